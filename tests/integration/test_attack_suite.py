"""The suite of attacks (``make attack``) itself: its table, and what a broken bound does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.attack.__main__ import main
from tests.attack.attacks import ATTACKS
from tests.attack.stage import Bound

QUICK = ("header", "sizes")


def test_what_honest_ones_felt_is_told_and_a_broken_bound_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unhurried = Bound(p99_ms=math.inf)  # other tests run beside this one
    attacks = [replace(each, bound=unhurried) for each in ATTACKS if each.name in QUICK]
    words = ["--only", *QUICK, "--json", str(tmp_path / "attack.json")]
    assert main(words, attacks) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(QUICK)
    assert all(line.endswith("kept") and "0 lost, +32 MiB" in line for line in lines)
    result = json.loads((tmp_path / "attack.json").read_text())
    assert [each["name"] for each in result["attacks"]] == list(QUICK)
    for each in result["attacks"]:
        assert each["under"]["asked"] and each["under"]["expected"] >= 5
        assert each["most_mib"] >= each["before_mib"] > 0
    assert result["machine"]["cores"]

    broken = [replace(attacks[0], bound=Bound(p99_ms=0.0))]
    assert main(["--only", QUICK[0]], broken) == 1
    *_, line, why = capsys.readouterr().out.splitlines()
    assert line.endswith("broken") and "of at most 0 ms" in why
    assert main([], [replace(broken[0], run=lambda stage: None)]) == 1, "nobody felt anything"


def test_every_attack_has_a_name_of_its_own() -> None:
    assert len({each.name for each in ATTACKS}) == len(ATTACKS)
