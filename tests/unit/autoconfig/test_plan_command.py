"""``kvtier plan``'s options, and what it prints."""

import argparse
import json

import pytest
import yaml

from kvtier.autoconfig import command
from kvtier.autoconfig.explain import table, value_text
from kvtier.autoconfig.facts import GIB, UNLIMITED, Facts, Memory
from kvtier.autoconfig.plan import make_plan
from kvtier.config.keys import KEYS
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known
from kvtier.core.terminal import size_text
from tests.model_configs import MODELS


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "2 gigs"])
def test_sizes_that_are_none(text):
    assert command.size("210GiB") == 210 * GIB
    with pytest.raises(argparse.ArgumentTypeError, match="210GiB"):
        command.size(text)


def plan(tmp_path, *options, model="qwen2.5-72b"):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS[model]))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--no-measure", "--model", str(config), *options]))


P4DE = ("--ram", "1130GiB", "--disk", "7000GiB", "--gpu", "A100-80GB:8", "--tp", "4")


def test_what_if_it_were_a_p4de(tmp_path, capsys):
    assert plan(tmp_path, *P4DE, "--yaml") == 0
    text = capsys.readouterr().out
    sections = yaml.safe_load(text)
    flat_names = {key.path: key.flat for key in KEYS.values()}
    values = {
        flat_names[f"{section}.{name}"]: value
        for section, inside in sections.items()
        for name, value in inside.items()
    }
    (tmp_path / "by-hand.yaml").write_text(text)
    config = load(tmp_path / "by-hand.yaml", env={})
    assert {key: config.value(key) for key in values} == values
    assert values["ram_bytes"] / GIB == 1130 / 2
    assert values["nvme_bytes"] == 3500 * GIB
    assert "2 x weights" not in text and "holds 1,851," in text
    assert plan(tmp_path, *P4DE, "--json") == 0
    assert json.loads(capsys.readouterr().out)["values"] == values


def test_an_engine_over_two_hosts_keeps_half_of_a_token_on_each(tmp_path, capsys):
    """So each host holds twice the tokens that the same engine's on one host would."""
    found = []
    for more in ((), ("--hosts", "2")):
        assert plan(tmp_path, *P4DE[:6], "--tp", "8", *more, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    alone, over_two = (
        {row["key"]: row["value"] for row in each["derived"]} | each["values"] for each in found
    )
    assert over_two["kv_bytes_per_token"] * 2 == alone["kv_bytes_per_token"]
    assert over_two["ram_bytes"] == alone["ram_bytes"]
    assert over_two["chunk_bytes"] == 256 * over_two["kv_bytes_per_token"]
    reasons = {row["key"]: row["reason"] for each in found[1:] for row in each["derived"]}
    assert "each of 2 hosts keeps what its 4 rank(s) have" in reasons["kv_bytes_per_token"]
    with pytest.raises(ConfigError, match="expected 8 ranks to be as many on each host"):
        plan(tmp_path, "--tp", "8", "--hosts", "3")


def test_what_if_it_were_a_spark(tmp_path, capsys):
    """Its CPU and GPU share one memory: it is not the model's KV that gets half of it."""
    sizes = ("--ram", "121GiB", "--disk", "3000GiB")
    assert plan(tmp_path, *sizes, "--gpu", "GB10", "--json", model="llama-3.1-8b") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["values"]["ram_bytes"] == 121 * GIB // 8 >> 20 << 20
    assert found["values"]["nvme_bytes"] == 1500 * GIB
    (row,) = [row for row in found["derived"] if row["key"] == "unified_memory"]
    assert (row["value"], row["source"]) == ("GB10", "what if")


def test_the_table_gives_key_value_source_and_reason(tmp_path, capsys):
    assert plan(tmp_path, *P4DE) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "kv_bytes_per_token" in line)
    assert (
        row.split("  ")[1:3] and "320 KiB" in row and "config.json" in row and "2 x KV heads" in row
    )
    assert [line.split() for line in lines].count(["key", "value", "source", "reason"]) == 2
    assert any(line.split() == ["redis", "no", "URL", "was", "given"] for line in lines)


def test_exit_code_says_when_kvtier_stays_off(tmp_path, capsys):
    assert plan(tmp_path, "--ram", "8GiB", "--gpu", "none") == 1
    assert "nothing: kvtier stays off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"), [(("--tp", "0"), "--tp 0"), (("--gpu", "abacus:3"), "abacus:3")]
)
def test_wrong_options_are_named(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        plan(tmp_path, *options)


def test_numbers_are_shown_for_people():
    assert size_text(3 << 40) == "3 TiB"
    assert value_text("ram_bytes", 210 * GIB) == "210 GiB"
    assert value_text("memlock_bytes", UNLIMITED) == "no limit"
    assert value_text("chunk_tokens", 1024) == "1,024"
    assert value_text("redis_url", "redis://me:secret@host:1/0") == "redis://me:***@host:1/0"
    nothing: Fact[int] = known(1, "a test")
    assert "nothing: kvtier stays off" in table(make_plan(Facts(memory=Memory(available=nothing))))


DOCUMENTS, BLOCKS, BLOCK_BYTES = 50, 4, 512 * 320 << 10
"""Documents that come round in turn, of so many blocks of 512 tokens with 320 KiB each."""


def trace_file(folder):
    path = folder / "day.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "timestamp": 1000 * turn,
                    "input_length": 512 * BLOCKS,
                    "output_length": 1,
                    "hash_ids": [BLOCKS * (turn % DOCUMENTS) + at for at in range(BLOCKS)],
                }
            )
            for turn in range(10 * DOCUMENTS)
        )
    )
    return str(path)


def test_a_trace_sizes_ram_at_the_knee_of_its_curve(tmp_path, capsys):
    options = (*P4DE, "--trace", trace_file(tmp_path))
    assert plan(tmp_path, *options, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    needed = DOCUMENTS * BLOCKS * BLOCK_BYTES
    assert told["values"]["ram_bytes"] == needed and "nvme_bytes" not in told["values"]
    (left_out,) = [each for each in told["left_out"] if each["tier"].startswith("nvme")]
    assert "adds less than a point to the 90.0% that RAM hits" in left_out["reason"]
    (ram,) = [row for row in told["settings"] if row["key"] == "ram_bytes"]
    why = "within a point of the knee: an LRU hits 0.0% with 7.812 GiB, 0.0% with 15.62 GiB, 90.0%"
    assert f"{why} with 31.25 GiB of day.jsonl" in ram["reason"]
    (knee,) = [row for row in told["derived"] if row["key"] == "trace_knee_bytes"]
    assert (knee["value"], knee["source"]) == (needed, "day.jsonl")
    assert "500 requests ask for 2,000 blocks of 512 tokens, 200 of them diff" in knee["reason"]
    assert plan(tmp_path, *options, "--yaml") == 0
    text = capsys.readouterr().out
    assert why in text and yaml.safe_load(text)["ram"]["bytes"] == needed
    assert plan(tmp_path, *options) == 0
    shown = capsys.readouterr().out
    assert why in shown and "trace_knee_bytes" in shown


def test_nvme_gets_what_ram_cannot_hold_and_no_more(tmp_path, capsys):
    options = ("--ram", "300GiB", "--disk", "7000GiB", "--gpu", "A100-80GB:8", "--tp", "4")
    assert plan(tmp_path, *options, "--json") == 0
    machine = json.loads(capsys.readouterr().out)["values"]
    needed = DOCUMENTS * BLOCKS * BLOCK_BYTES
    assert 20 * GIB < machine["ram_bytes"] < needed
    assert plan(tmp_path, *options, "--trace", trace_file(tmp_path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["values"]["ram_bytes"] == 10 * GIB, "room for one long context"
    assert told["values"]["nvme_bytes"] == needed
    reasons = {row["key"]: row["reason"] for row in told["settings"]}
    assert f"of what all {size_text(machine['ram_bytes'])} would hit" in reasons["ram_bytes"]
    assert "the knee: an LRU hits" in reasons["nvme_bytes"]


def test_a_machine_that_is_too_small_for_the_knee_gives_what_it_has(tmp_path, capsys):
    options = ("--ram", "300GiB", "--disk", "20GiB", "--gpu", "A100-80GB:8", "--tp", "4")
    assert plan(tmp_path, *options, "--trace", trace_file(tmp_path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["values"]["ram_bytes"] == 10 * GIB and "nvme_bytes" not in told["values"]


@pytest.mark.parametrize(
    ("text", "says"), [("1,2\n2,3\n", "counts objects and no tokens"), ("", "has no full block")]
)
def test_a_trace_without_tokens_cannot_size_anything(text, says, tmp_path):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError, match=says):
        plan(tmp_path, "--trace", str(tmp_path / "trace"))
