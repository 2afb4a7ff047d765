"""Power cuts on recorded writes. ``python -m tests.trust.power --cuts 10000`` for more."""

from __future__ import annotations

import logging

import pytest

from tests.trust.power import many

CUTS = 500


def test_a_power_cut_may_cost_chunks_and_never_makes_a_lie(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    damage = many(CUTS)
    assert damage.violations == []
    assert damage.cuts == CUTS
    assert damage.sectors > 20 * CUTS
    assert min(damage.counts[what] for what in ("found", "served", "corrupt", "certain")) > CUTS
