"""Damage to NVMe files, Redis values and objects: every header bit, more than 10,000 payload bits,
files, values, strangers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.tiers.nvme.index import RECORD_BYTES
from tests.trust import corruption

NVME_BITS, REDIS_BITS, OBJECT_BITS = 7_000, 4_000, 4_000


def test_no_damage_to_nvme_files_is_served_or_goes_uncounted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    tally = corruption.nvme(tmp_path, NVME_BITS)
    assert tally.violations == []
    assert tally.bits >= NVME_BITS + 8 * (corruption.SUPERBLOCK_BYTES + RECORD_BYTES)
    assert tally.cases >= tally.bits


@pytest.mark.redis
def test_no_damage_to_redis_values_is_served_or_goes_uncounted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    tally = corruption.redis(REDIS_BITS)
    assert tally.violations == []
    assert tally.bits >= REDIS_BITS + 8 * 80
    assert tally.cases >= tally.bits


def test_no_damage_to_objects_is_served_or_goes_uncounted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    tally = corruption.objects(OBJECT_BITS)
    assert tally.violations == []
    assert tally.bits >= OBJECT_BITS + 8 * 80
    assert tally.cases >= tally.bits
