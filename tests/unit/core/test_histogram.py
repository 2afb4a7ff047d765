"""Durations by powers of two: nothing is lost, and a place's bounds are those that are told."""

from __future__ import annotations

import random

import pytest

from kvtier.core.histogram import BOUNDS, Histogram


def test_a_duration_is_counted_in_the_place_whose_bounds_hold_it() -> None:
    for place, bound in enumerate(BOUNDS):
        for seconds in (bound * 0.51, bound * 0.99):
            histogram = Histogram()
            histogram.add(seconds)
            assert histogram.counts.index(1) == place
            assert histogram.sums[place] == seconds


@pytest.mark.parametrize(
    ("seconds", "place"), [(0.0, 0), (1e-9, 0), (100.0, len(BOUNDS)), (1e9, len(BOUNDS))]
)
def test_what_is_shorter_or_longer_than_all_bounds_has_a_place_too(
    seconds: float, place: int
) -> None:
    histogram = Histogram()
    histogram.add(seconds)
    assert histogram.counts[place] == 1 and len(histogram.counts) == len(BOUNDS) + 1


def test_counts_and_sums_are_whole() -> None:
    draw, histogram = random.Random(0), Histogram()
    given = [10 ** draw.uniform(-8, 3) for _ in range(2000)]
    for seconds in given:
        histogram.add(seconds)
    assert sum(histogram.counts) == 2000 and sum(histogram.sums) == pytest.approx(sum(given))
