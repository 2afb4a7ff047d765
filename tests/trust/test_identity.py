"""The slice of the identity oracle (:mod:`tests.trust.identity`) that every change has to pass."""

import ast

import pytest

from tests.conftest import ROOT
from tests.trust.identity.__main__ import COLD, SEEN, WRONG, Told, run, status
from tests.trust.identity.catalogue import BASES, ROWS
from tests.trust.identity.rows import CONTROL

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
FEWEST = 40


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    rows = [row for row in ROWS if row.slice]
    outcome = run(rows, tmp_path_factory.mktemp("identity"), at_once=1)
    return {(one.base, one.name): one for one in outcome}


@pytest.mark.timeout(1200)
def test_an_engine_finds_only_what_it_would_have_computed(told):
    failed = [one for one in told.values() if not one.verdict.startswith(("equal", SEEN))]
    assert failed == []
    assert status(list(told.values())) == 0


@pytest.mark.timeout(1200)
def test_a_wrong_answer_is_seen(told):
    planted = [told[row.base, row.name] for row in ROWS if row.planted]
    assert planted and all(one.verdict == SEEN for one in planted)


def test_status_tells_a_wrong_row_from_a_test_of_nothing():
    equal, cold = Told("a", "tiny", "equal, cold"), Told(CONTROL, "tiny", "equal, cold")
    assert status([equal]) == 0
    assert [status([equal, Told("b", "tiny", verdict)]) for verdict in (WRONG, COLD)] == [1, 1]
    assert status([equal, cold]) == 2


def test_the_oracle_has_rows_enough_and_each_has_its_engine():
    assert len({row.name for row in ROWS}) >= FEWEST
    assert {row.base for row in ROWS} == {base.name for base in BASES}
    assert len({(row.base, row.name) for row in ROWS}) == len(ROWS)


def test_the_oracle_does_not_know_what_keys_are_made_of():
    for file in (ROOT / "tests/trust/identity").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if "identity" in name and "kvtier" in name]
