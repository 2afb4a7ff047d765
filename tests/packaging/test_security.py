"""SECURITY's table names for each attacker a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".github/SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py|tests/[\w/]+)`")


def attackers() -> list[str]:
    """The rows of the first table."""
    table = TEXT[TEXT.index("| who |") :]
    return table[: table.index("\n\n")].splitlines()[2:]


def test_every_attacker_has_a_test() -> None:
    assert len(attackers()) >= 25
    assert not [row for row in attackers() if not NAMED.findall(row.rpartition(" | ")[2])]


def test_every_test_that_is_named_is_there() -> None:
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = NAMED.findall(TEXT)
    assert not [one for one in named if one not in names and not (ROOT / one).exists()]


def test_every_attacker_there_is_now_has_a_row() -> None:
    whom = {row.split("|")[1].strip() for row in attackers()}
    for words in (
        "another user of the host",
        "without the admin token",
        "beside `server.events`",
        "an engine of the fleet",
        "with an API key",
        "without an API key",
        "hostile or broken bucket",
        "hostile or broken Redis",
        "a tenant by salt",
        "a tenant by namespace",
        "read logs",
    ):
        assert any(words in one for one in whom), words
