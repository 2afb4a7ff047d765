"""The NVMe tier's names for :mod:`kvtier.tiers.registry`."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text
from kvtier.tiers.finding import Finding
from kvtier.tiers.nvme.disks import disk_threads, probe_disk
from kvtier.tiers.nvme.section import NvmeSection
from kvtier.tiers.seam import Draft, Opened, Opening, TierFacts, Trial, then_tried

SECTION = NvmeSection
_TRIAL_BYTES = 5 << 20

logger = logging.getLogger("kvtier")


def open(own: NvmeSection, around: Opening) -> Opened:
    from kvtier.tiers.nvme.tier import NvmeTier

    folder = own.folder(around.replica)
    own = replace(own, path=str(folder))
    tier = NvmeTier(
        folder,
        own.room,
        around.chunk_bytes,
        lent=around.lent,
        in_huge_pages=around.in_huge_pages,
    )
    disk = probe_disk(str(folder))
    said = (
        f"NVMe: {size_text(disk.own.value or 0)} reserved in {folder}, and kept after the end for "
        f"a warm start; 'kvtier clear --folder {folder}' gives it back"
    )
    return Opened(tier, disk_threads(disk, len(os.sched_getaffinity(0))), said)


def away(own: NvmeSection) -> str:
    """Nothing but an error is away for a disk."""
    from kvtier.tiers.nvme.findings import disk_findings

    for finding in disk_findings(own, probe_disk(str(own.path))):
        if finding.state == "fail":
            raise ConfigError(f"nvme_path={own.path}: {finding.seen}; {finding.do}")
        if finding.state == "warn":
            logger.warning("nvme_path=%s: %s; %s", own.path, finding.seen, finding.do)
    return ""


def probe(_own: NvmeSection) -> TierFacts:
    return TierFacts()


def findings(own: NvmeSection, tried: Trial | None) -> Iterator[Finding]:
    from kvtier.tiers.nvme.findings import disk_findings

    seen = disk_findings(own, probe_disk(str(own.path)))
    do = f"look at the file system of {own.path} and the kernel's log (dmesg)"
    yield from then_tried(seen, tried and partial(in_a_folder_of_its_own, tried), own, do)


def in_a_folder_of_its_own(tried: Trial, own: NvmeSection) -> str:
    """The self-test below the folder, so that no engine's files are touched."""
    place, folder = Path(str(own.path)), Path(str(own.path)) / f"selftest-{os.getpid()}"
    made = [one for one in (place, *place.parents) if not one.exists()]
    try:
        return tried(NvmeSection(path=str(folder), bytes_=_TRIAL_BYTES))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for one in made:
                one.rmdir()


def plan(_found: TierFacts | None, _draft: Draft) -> None:
    """The disk's part follows from RAM's and from what was recorded, so
    :mod:`kvtier.autoconfig.plan` does it."""
