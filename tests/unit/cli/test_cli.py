"""The ``kvtier`` command: what it prints, how it ends, and that it imports only what it runs."""

import logging
import re
import sys
from types import ModuleType

import pytest
import yaml

from kvtier.cli import key_flags, serve
from kvtier.cli import main as cli
from kvtier.cli.operate import TokenCommand
from kvtier.config.keys import KEYS, Config
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.started import Started
from tests.command import ran


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("KVTIER_CONFIG_FILE", "LMCACHE_CONFIG_FILE", "OPTION_LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_config_prints_every_key_and_its_source(capsys):
    assert cli.main(["config", "--chunk-tokens", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["key", *(key.path for key in KEYS.values())]
    assert lines[1].split()[1:4] == ["512", "tokens", "flag"]


def test_config_yaml_is_a_file_that_gives_the_same(capsys, tmp_path):
    given = ["--ram-bytes", "4GiB", "--nvme-path", "/mnt/a b", "--save-decode", "no"]
    assert cli.main(["config", "--yaml", *given]) == 0
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    found = (values["ram"]["bytes"], values["nvme"]["path"], values["engine"]["save_decode"])
    assert found == (4 * 2**30, "/mnt/a b", False)
    (tmp_path / "again.yaml").write_text(printed)
    assert cli.main(["config", "--yaml", "--config", str(tmp_path / "again.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == values


def test_a_wrong_value_ends_with_2_and_one_line(capsys):
    assert cli.main(["config", "--ram-bytes", "much"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvtier: ram_bytes='much' (flag): expected a size")
    assert shown.err.count("\n") == 1


def test_no_words_show_what_there_is(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert "benchmarks: long-doc-qa" in shown
    assert all(name.split()[0] in shown for name in cli.COMMANDS)


def test_a_command_is_imported_when_it_is_run_and_its_status_is_ours(monkeypatch, capsys):
    def add_arguments(parser):
        parser.add_argument("--status", type=int)

    def run(arguments):
        if arguments.status is None:
            raise ConfigError("status=None: expected a number")
        return int(arguments.status)

    module = ModuleType("made_up_command")
    module.__dict__.update(add_arguments=add_arguments, run=run)
    made_up = cli.Subcommand("made_up_command", "for this test")
    monkeypatch.setitem(cli.COMMANDS, "bench made-up", made_up)
    assert cli.main(["version"]) == 0
    monkeypatch.setitem(sys.modules, "kvtier.made_up_command", module)
    assert cli.main(["bench", "made-up", "--status", "7"]) == 7
    assert cli.main(["bench", "made-up"]) == 2
    assert "kvtier: status=None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "long-doc-qa", "--arms", "none,kvtier"], "unknown arm kvtier; known: none,"),
        (["plan", "--ram", "much"], "'much' is not a size"),
        (["stats", "--wach"], "unrecognized arguments: --wach"),
        (["nonsense"], "no command 'nonsense'"),
        (["bench", "nonsense"], "no command 'nonsense'"),
        (["bench"], "the following arguments are required"),
    ],
)
def test_a_wrong_word_is_one_line_and_not_all_of_the_usage(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert said in told and told.count("\n") == 1 and "--help" in told


def refused(capsys, *words):
    """The one line of a command that is refused for what was typed."""
    status: object = None
    try:
        status = cli.main(list(words))
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_a_flag_is_written_whole(capsys):
    said = refused(capsys, "config", "--ram-bytes", "64MiB", "--ram-byte", "3")
    assert "unrecognized arguments: --ram-byte 3; the nearest is '--ram-bytes'" in said
    assert "nearest" not in refused(capsys, "config", "--quite-something-else")
    assert "the nearest is '--namespace'" in refused(capsys, "clear", "--namespce", "x")


def test_a_far_command_is_not_named_and_a_key_is(capsys):
    assert "engine.record" in refused(capsys, "record")
    assert "the nearest is 'launch'" in refused(capsys, "lauch")
    said = refused(capsys, "xyzzy")
    assert "nearest" not in said and "there are bench, check" in said


def flags(capsys, *words):
    with pytest.raises(SystemExit):
        cli.main(list(words))
    return set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("serve", {"--spans", "--server-timeout-ms", "--save-decode", "--server"}),
        ("launch", {"--admin", "--admin-engines", "--slot-bytes", "--namespace-percent"}),
        ("doctor", set()),
        ("config", set()),
    ],
)
def test_help_shows_what_most_give_and_no_flag_without_an_effect(command, others, capsys):
    usual = flags(capsys, command, "--help")
    every = flags(capsys, command, "--help-all")
    assert {"--ram-bytes", "--nvme-path", "--redis-url", "--help-all"} <= usual < every
    assert not others & every
    assert every >= {f"--{key.replace('_', '-')}" for key in KEYS} - _NOT_OF_ALL
    assert len(usual) <= 30
    for flag in others:
        assert f"{flag} is a" in refused(capsys, command, flag, "x")


_NOT_OF_ALL = {f"--{key.replace('_', '-')}" for keys in key_flags._NOT_OF.values() for key in keys}


def test_a_shell_completes_the_flags_of_the_command_that_is_typed(monkeypatch):
    known = []

    def autocomplete(parser):
        (branches,) = (one for one in parser._actions if isinstance(one.choices, dict))
        assert isinstance(branches.choices, dict)
        known.append(branches.choices["serve"].format_help())
        raise SystemExit(0)

    library = ModuleType("argcomplete")
    vars(library)["autocomplete"] = autocomplete
    monkeypatch.setitem(sys.modules, "argcomplete", library)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", "kvtier serve --ra")
    with pytest.raises(SystemExit):
        cli.main([])
    assert "--ram-bytes" in known[0] and "--namespace-percent" in known[0]
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert cli.main(["version"]) == 0, "without the library a command is a command"


def test_a_password_in_a_flag_is_warned_of(caplog):
    """Every user of the host can read /proc/PID/cmdline."""
    for flag, url in (("redis-url", "redis://:s3cret@h:1/0"), ("redis_url", "rediss://me:x@h:1")):
        given = load(flags={flag.replace("-", "_"): url}, env={})
        (told,) = given.remarks
        assert told.level == logging.WARNING and "every user of this host" in told.text
        assert "redis_url holds a password" in told.text and "s3cret" not in told.text
        assert not load(env={"KVTIER_REDIS_URL": url}).remarks
    assert load(flags={"redis": {"url": "redis://:x@h:1/0"}}, env={}).remarks
    assert not load(flags={"redis_url": "redis://h:1/0"}, env={}).remarks


def test_too_little_address_space_is_one_line(tmp_path):
    command = ["sh", "-c", 'ulimit -v 204800; exec "$0" -m kvtier config', sys.executable]
    done = ran(command)
    assert done.returncode == 2 and done.stderr.startswith("kvtier: RLIMIT_AS is 200 MiB: give")
    assert done.stderr.count("\n") == 1


def test_no_memory_is_one_line(capsys, monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(TokenCommand, "run", staticmethod(fails))
    assert "no memory; give at least 512 MiB" in refused(capsys, "token")


def test_a_socket_that_may_not_be_made_names_one_that_may(capsys, monkeypatch):
    def denied(_):
        raise PermissionError(13, "Permission denied", "/run/kvtier")

    monkeypatch.setattr(serve, "listen_unix", denied)
    with pytest.raises(ConfigError, match=r"/run/kvtier: Permission denied.*XDG_RUNTIME_DIR"):
        serve._listeners(Started(Config()), ["unix:///run/kvtier/kvtier.sock"], False)
