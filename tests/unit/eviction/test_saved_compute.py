"""What a hit spares grows with the depth of its tokens, as the model's shape says."""

import math

import pytest

from kvtier.eviction.saved_compute import DEFAULT_S0_TOKENS, SavedCompute, balance


def test_the_default_is_that_of_an_8b_model():
    assert balance(8_000_000_000, 2 * 32 * 32 * 128) == pytest.approx(DEFAULT_S0_TOKENS, rel=0.01)
    assert balance(8_000_000_000, 0) == math.inf


@pytest.mark.parametrize(("first", "chunks"), [(0, 0), (0, 1), (0, 400), (37, 63)])
def test_a_run_spares_the_sum_of_its_chunks(first, chunks):
    spared = SavedCompute(256, 10_000.0)
    middles = [(number + 0.5) * 256 for number in range(first, first + chunks)]
    assert spared.of(chunks, first) == pytest.approx(sum(1 + at / 10_000.0 for at in middles))
    assert SavedCompute(256, math.inf).of(chunks, first) == chunks
