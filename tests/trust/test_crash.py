"""A short campaign of kill -9. ``python -m tests.trust.crash --kills 1000`` for a long one."""

from __future__ import annotations

import pytest

from tests.trust.crash import many

KILLS = 24


@pytest.mark.redis
def test_kill_9_at_random_moments_leaves_only_right_bytes_and_nothing_else() -> None:
    toll = many(KILLS)
    assert toll.violations == []
    assert toll.kills.total() >= KILLS
    assert toll.kills.keys() == {"server", "engine of a server", "engine with a store"}, (
        "who never died is not tested"
    )
    assert toll.recovered["server"] > 0
    assert toll.recovered["engine with a store"] > 0
