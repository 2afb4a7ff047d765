"""TierFolder: a tier's folder (:mod:`kvtier.tiers.own_folder`), with a page of measured speeds. Who
may write its parents can take it away, which :func:`leads_to` notices.

An engine or server that was killed may live on for some seconds while it ends. The next one finds
its chunks warm if it waits for that (:func:`wait_until_free`)."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from glob import iglob
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import TierError
from kvtier.core.lanes import Lane, future_of
from kvtier.tiers.nvme.index import Superblock
from kvtier.tiers.own_folder import OwnFolder

logger = logging.getLogger("kvtier")

INDEX_NAME = "index.kvtier"
SLOTS_NAME = "slots.kvtier"
LEARNT_NAME = "learnt.kvtier"
ANSWER_S = 5.0
"""Time after which a file system that does not answer is silent."""
_HELD_S = 30.0
"""Longest wait. A killed engine ends within seconds, or never."""
_POLL_S = 0.1
R = TypeVar("R")
Q = TypeVar("Q")
_silent: dict[Path, Future[Any]] = {}


def is_silent(folder: Path) -> bool:
    return any(folder.is_relative_to(at) and not one.done() for at, one in list(_silent.items()))


def asked(folder: Path, look: Callable[[], R], otherwise: Q) -> R | Q:
    """Return the result of ``look`` at ``folder``, or raise what it raises. Returns ``otherwise``
    if the file system is silent. Below that folder nothing more is asked before it answers."""
    if is_silent(folder):
        return otherwise
    lane = Lane("look", 1, urgent_bound=0, bound=1)
    found = future_of(lane, look)
    assert found is not None, "its lane was empty"
    try:
        return found.result(ANSWER_S)
    except TimeoutError:
        if found.done():
            raise
        _silent[folder] = found
        return otherwise
    finally:
        lane.close(0.0)


def below(place: Path, pattern: str) -> list[Path] | None:
    """Return the paths that match, or None if the file system is silent."""
    return asked(place, lambda: list(place.glob(pattern)), None)


class TierFolder(OwnFolder):
    """An :class:`OwnFolder` that raises TierError and OSError."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        super().__init__(path, f"NVMe tier {path}", TierError, make=make)


def may_take(path: Path) -> bool:
    try:
        with TierFolder(path):
            return True
    except FileNotFoundError:
        return True
    except (OSError, TierError):
        return False


def leads_to(path: Path, fd: int) -> bool:
    """Return whether ``path`` still names the open file, or a failing disk cannot tell."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def holders_of_removed(path: Path) -> list[int]:
    """Return processes of this user (for root: all) that have a removed ``path`` open. Looks at
    every open file of theirs: some 0.1 s on a busy host."""
    gone, holders = f"{path} (deleted)", set()
    for link in iglob("/proc/[0-9]*/fd/*"):  # Path.glob fails when a process ends meanwhile
        with suppress(OSError):
            if os.readlink(link) == gone:
                holders.add(int(Path(link).parts[2]))
    return sorted(holders)


def lock(index: int) -> str:
    """Lock a folder by its index file. Returns the process that holds it, "" on success."""
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = Superblock.unpack(os.pread(index, PAGE_BYTES, 0))
        return f"process {holder.pid}" if holder else "another process"
    return ""


def holder(folder: Path) -> str:
    """Return the process that has this tier open. Empty if none, not this user's, or silent."""
    return asked(folder, lambda: _holder(folder), "")


def _holder(folder: Path) -> str:
    with (
        suppress(OSError, TierError),
        TierFolder(folder) as files,
        files.opened(INDEX_NAME, os.O_RDONLY) as index,
    ):
        return lock(index)
    return ""


def wait_until_free(folders: Iterable[Path], most_s: float = _HELD_S) -> None:
    """Log who has a folder, and wait for its end. Raises TierError after ``most_s`` seconds."""
    until = time.monotonic() + most_s
    for folder in folders:
        told = ""
        while who := holder(folder):
            if who != told:
                logger.warning(
                    "NVMe tier %s: in use by %s. An engine that was killed needs some seconds to "
                    "end: waiting for it, at most %.0f s",
                    folder,
                    who,
                    most_s,
                )
                told = who
            if time.monotonic() >= until:
                raise TierError(
                    f"NVMe tier {folder}: still in use by {who} after {most_s:.0f} s; end it (an "
                    "engine's own processes go on when the one that started them was killed), or "
                    "give this one a folder of its own in nvme_path"
                )
            time.sleep(_POLL_S)


_FORMAT = b"kvtier/learnt/1\n"
_CHECKSUM_BYTES = 16
_MOST_NAMES, _NAME_LETTERS = 8, 120
"""Most engines and places. They fill at most half a page."""
_SLOWEST_TOKEN_S, _SLOWEST_CHUNK_S = 60.0, 600.0


class Learnt(msgspec.Struct):
    engines: dict[str, tuple[float, float]] = {}
    """Engine -> seconds a token, and a token of depth. The newest is last."""
    paces: dict[str, float] = {}
    """Place and size -> seconds of reading a chunk. The newest is last."""


def read_learnt(folder: Path) -> Learnt:
    return asked(folder, lambda: _read_learnt(folder), Learnt())


def _read_learnt(folder: Path) -> Learnt:
    try:
        with TierFolder(folder) as files, files.opened(LEARNT_NAME, os.O_RDONLY) as fd:
            page = os.pread(fd, PAGE_BYTES, 0)
        body = page[_CHECKSUM_BYTES:]
        if xxh3_128_digest(body) != page[:_CHECKSUM_BYTES] or not body.startswith(_FORMAT):
            return Learnt()
        found = msgspec.json.decode(body[len(_FORMAT) :], type=Learnt)
    except (OSError, TierError, msgspec.MsgspecError, ValueError):
        return Learnt()
    return _bounded(found)


def write_learnt(folder: Path, learnt: Learnt) -> None:
    """Replace the page. A failure costs only the next start's knowledge."""
    body = _FORMAT + msgspec.json.encode(_bounded(learnt))
    page = body.ljust(PAGE_BYTES - _CHECKSUM_BYTES)
    with (
        suppress(OSError, TierError),
        TierFolder(folder) as files,
        files.opened(LEARNT_NAME, os.O_WRONLY, make=True) as fd,
    ):
        os.pwrite(fd, xxh3_128_digest(page) + page, 0)


def _bounded(found: Learnt) -> Learnt:
    engines = {
        name[:_NAME_LETTERS]: each
        for name, each in found.engines.items()
        if 0 < each[0] < _SLOWEST_TOKEN_S and 0 <= each[1] < _SLOWEST_TOKEN_S
    }
    paces = {
        name[:_NAME_LETTERS]: each
        for name, each in found.paces.items()
        if 0 < each < _SLOWEST_CHUNK_S
    }
    return Learnt(dict([*engines.items()][-_MOST_NAMES:]), dict([*paces.items()][-_MOST_NAMES:]))
