"""``kvtier plan``'s options, and what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.autoconfig import command
from kvtier.autoconfig.explain import table, value_text
from kvtier.autoconfig.facts import UNLIMITED, Fact, Facts, Memory, known
from kvtier.autoconfig.plan import make_plan
from kvtier.config.keys import PATHS
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text

GIB = 1 << 30
MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "model_configs.json").read_text()
)


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "2 gigs"])
def test_sizes_that_are_none(text: str) -> None:
    assert command.size("210GiB") == 210 * GIB
    with pytest.raises(argparse.ArgumentTypeError, match="210GiB"):
        command.size(text)


def plan(tmp_path: Path, *options: str, model: str = "qwen2.5-72b") -> int:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS[model]))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--no-measure", "--model", str(config), *options]))


P4DE = ("--ram", "1130GiB", "--disk", "7000GiB", "--gpu", "A100-80GB:8", "--tp", "4")


def test_what_if_it_were_a_p4de(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, *P4DE, "--yaml") == 0
    text = capsys.readouterr().out
    sections = yaml.safe_load(text)
    values = {
        PATHS[f"{section}.{name}"].flat: value
        for section, inside in sections.items()
        for name, value in inside.items()
    }
    (tmp_path / "by-hand.yaml").write_text(text)
    config = load(tmp_path / "by-hand.yaml", env={})
    assert {key: getattr(config, key) for key in values} == values
    assert values["ram_bytes"] / GIB == pytest.approx(1130 - 2 * 135.4, rel=0.001)
    assert values["nvme_bytes"] == 6300 * GIB
    assert "2 x weights" not in text and "holds 2,815," in text
    assert plan(tmp_path, *P4DE, "--json") == 0
    assert json.loads(capsys.readouterr().out)["values"] == values


def test_the_table_gives_key_value_source_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, *P4DE) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "kv_bytes_per_token" in line)
    assert (
        row.split("  ")[1:3] and "320 KiB" in row and "config.json" in row and "2 x KV heads" in row
    )
    assert [line.split() for line in lines].count(["key", "value", "source", "reason"]) == 2
    assert any(line.split() == ["redis", "no", "URL", "was", "given"] for line in lines)


def test_exit_code_says_when_kvtier_stays_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--ram", "8GiB", "--gpu", "none") == 1
    assert "nothing: kvtier stays off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"), [(("--tp", "0"), "--tp 0"), (("--gpu", "abacus:3"), "abacus:3")]
)
def test_wrong_options_are_named(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(tmp_path, *options)


def test_numbers_are_shown_for_people() -> None:
    assert size_text(3 << 40) == "3 TiB"
    assert value_text("ram_bytes", 210 * GIB) == "210 GiB"
    assert value_text("memlock_bytes", UNLIMITED) == "no limit"
    assert value_text("chunk_tokens", 1024) == "1,024"
    assert value_text("redis_url", "redis://me:secret@host:1/0") == "redis://me:***@host:1/0"
    nothing: Fact[int] = known(1, "a test")
    assert "nothing: kvtier stays off" in table(make_plan(Facts(memory=Memory(available=nothing))))
