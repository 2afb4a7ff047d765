"""The ``kvtier`` command: what it prints, how it ends, and that it imports only what it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from kvtier import __version__
from kvtier.cli import main as cli
from kvtier.config.keys import PATHS
from kvtier.core.errors import ConfigError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTIER_CONFIG_FILE", "LMCACHE_CONFIG_FILE", "OPTION_LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"kvtier {__version__}\n"


def test_config_prints_every_key_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--chunk-tokens", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["key", *PATHS]
    assert lines[1].split()[1:4] == ["512", "tokens", "flag"]


def test_config_yaml_is_a_file_that_gives_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--ram-bytes", "4GiB", "--nvme-path", "/mnt/a b", "--save-decode", "no"]
    assert cli.main(["config", "--yaml", *given]) == 0
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert (values["ram"]["bytes"], values["nvme"]["path"], values["engine"]["save_decode"]) == (
        4 * 2**30,
        "/mnt/a b",
        False,
    )
    (tmp_path / "again.yaml").write_text(printed)
    assert cli.main(["config", "--yaml", "--config", str(tmp_path / "again.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == values


def test_a_wrong_value_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--ram-bytes", "much"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvtier: ram_bytes='much' (flag): expected a size")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["nonsense"], ["bench"], ["bench", "nonsense"], ["version", "--loud"]]
)
def test_unknown_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("kvtier") and "--help' shows what there is" in told


def test_no_words_show_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert "benchmarks: long-doc-qa" in shown
    assert all(name.split()[0] in shown for name in cli.COMMANDS)


def test_a_command_is_imported_when_it_is_run_and_its_status_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--status", type=int)

    def run(arguments: argparse.Namespace) -> int:
        if arguments.status is None:
            raise ConfigError("status=None: expected a number")
        return int(arguments.status)

    module = ModuleType("made_up_command")
    module.__dict__.update(add_arguments=add_arguments, run=run)
    monkeypatch.setitem(cli.COMMANDS, "bench made-up", ("for this test", "made_up_command"))
    assert cli.main(["version"]) == 0
    monkeypatch.setitem(sys.modules, "made_up_command", module)
    assert cli.main(["bench", "made-up", "--status", "7"]) == 7
    assert cli.main(["bench", "made-up"]) == 2
    assert "kvtier: status=None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "long-doc-qa", "--arms", "none,kvtier"], "unknown arm kvtier; known: none,"),
        (["plan", "--ram", "much"], "'much' is not a size"),
        (["stats", "--wach"], "unrecognized arguments: --wach"),
    ],
)
def test_a_wrong_word_is_one_line_and_not_all_of_the_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert said in told and told.count("\n") == 1 and "--help" in told


def test_a_small_model_is_made_by_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("not a model")
    assert cli.main(["bench", "model", str(tmp_path / "mine")]) == 2
    assert f"kvtier: {tmp_path / 'mine'}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_keys_are_flags_of_what_starts_something(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--ram-bytes", "much"]) == 2
    assert "kvtier: ram_bytes='much' (flag): expected a size" in capsys.readouterr().err
