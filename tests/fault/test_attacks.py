"""``make attack``'s table: what every attack costs the others is within its bound. Here without
their time, because other tests run beside these."""

import math
from dataclasses import replace

import pytest

from tests.attack.__main__ import main
from tests.attack.attacks import ATTACKS
from tests.attack.stage import Bound
from tests.server_process import short_folder

MARKS = {
    **dict.fromkeys(("questions", "handshakes", "object", "refusal", "page", "cluster"), "whole"),
    "clear": "redis",
}


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(one, id=one.name, marks=getattr(pytest.mark, MARKS.get(one.name, "core")))
        for one in ATTACKS
    ],
)
def test_an_attack_costs_others_no_more_than_its_bound(attack):
    with short_folder() as folder:
        felt = attack.felt(folder)
    assert felt.beyond(replace(attack.bound, p99_ms=math.inf)) == []
    assert felt.under.asked and felt.under.expected >= 5 and felt.before_mib > 0


def test_a_bound_that_is_broken_is_a_failure(capsys):
    header = next(one for one in ATTACKS if one.name == "header")
    assert main(["--only", "header"], [replace(header, bound=Bound(p99_ms=0.0))]) == 1
    *_, line, why = capsys.readouterr().out.splitlines()
    assert line.endswith("broken") and "of at most 0 ms" in why
    assert main([], [replace(header, run=lambda stage: None)]) == 1, "nobody felt anything"
    assert len({one.name for one in ATTACKS}) == len(ATTACKS)
