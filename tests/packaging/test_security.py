"""SECURITY's table names for each attacker a test that is there."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / ".github/SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py|tests/[\w/]+)`")
WHOM = (
    "another user of the host", "without the admin token", "beside `server.events`",
    "an engine of the fleet", "with an API key", "without an API key", "hostile or broken bucket",
    "hostile or broken Redis", "a tenant by salt", "a tenant by namespace", "read logs",
)  # fmt: skip


def test_every_attacker_has_a_test():
    table = TEXT[TEXT.index("| who |") :]
    attackers = table[: table.index("\n\n")].splitlines()[2:]
    assert len(attackers) >= 25
    assert not [row for row in attackers if not NAMED.findall(row.rpartition(" | ")[2])]
    whom = [row.split("|")[1] for row in attackers]
    assert [words for words in WHOM if not any(words in one for one in whom)] == []
