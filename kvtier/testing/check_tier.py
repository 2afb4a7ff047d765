"""The promises of :mod:`kvtier.tiers.base` as a test, for every tier, yours too."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import shake_128
from threading import Event

from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.tenant import NOBODY, owner_of, tenant
from kvtier.tiers.base import Tier

Make = Callable[[], Tier]
_RUN = 6
_THREADS = 4
_GUARD = 64
_LEAST = 8
_MOST_FILLED = 256
_TURNS = 40


def check_tier(make: Make, *, chunk_bytes: int, reopen: Make | None = None) -> None:
    """Check every promise of :class:`~kvtier.tiers.base.Tier`. Raises AssertionError with the
    promise that is broken.

    Args:
        make: opens a tier of at least 8 chunks that holds nothing.
        chunk_bytes: size of the chunks to use. It need not be a multiple of anything.
        reopen: opens again what the last tier from ``make`` kept when it was closed. None for a
            tier that keeps nothing. Not for tiers that others share, whose order is not theirs to
            keep.
    """
    runs = [
        ChunkLayout(bytes(32), 1, 1, (chunk_bytes,)).keys([prompt] * _RUN)
        for prompt in range(_THREADS)
    ]
    _check_face(make)
    _check_bytes(make, runs[0], chunk_bytes)
    _check_find(make, runs[0], chunk_bytes)
    _check_delete(make, runs[0], chunk_bytes)
    _check_names(make, runs[0], chunk_bytes)
    _check_owners(make, reopen, runs[0], chunk_bytes)
    _check_capacity(make, chunk_bytes)
    _check_threads(make, runs, chunk_bytes)
    _check_race(make, runs[0], chunk_bytes)
    if reopen is not None:
        _check_restart(make, reopen, runs[:2], chunk_bytes)
        _check_restart_order(make, reopen, runs[:2], chunk_bytes)


def content(key: ChunkKey, chunk_bytes: int) -> memoryview:
    """The chunk of a key: bytes that differ from every other key's, in a read-only buffer that is
    not page-aligned."""
    return memoryview(shake_128(key).digest(chunk_bytes))


def _promise(kept: bool, words: str) -> None:
    if not kept:
        raise AssertionError(f"broken promise: {words}")


def _aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))[:size]


def _holds(tier: Tier, key: ChunkKey, chunk_bytes: int) -> bool:
    """Read a chunk. AssertionError if the tier lies."""
    into = _aligned(chunk_bytes)
    _promise(tier.may_read(key), "a tier whose medium answers may be read")
    held = tier.read(key, into)
    _promise(held is not None, "a medium that answers is never None")
    _promise(
        held is False or into == content(key, chunk_bytes),
        "a read is True only with exactly the bytes written",
    )
    return bool(held)


def _write_all(tier: Tier, keys: Sequence[ChunkKey], chunk_bytes: int) -> None:
    for key in keys:
        _promise(tier.write(key, content(key, chunk_bytes)), "a write within capacity is True")


def _check_face(make: Make) -> None:
    tier = make()
    _promise(tier.name != "", "name is a word")
    _promise(tier.capacity >= _LEAST, f"capacity is a number of chunks, here {_LEAST} or more")
    _promise(tier.shared in (True, False), "shared is a bool")
    _promise(tier.keeps_owners in (True, False), "keeps_owners is a bool")
    _promise(tier.chunk_room >= 0 and tier.fixed_room >= 0, "room is a number of bytes")
    _promise(tier.resize(tier.capacity) == tier.capacity, "a tier has room for its capacity")
    _promise(
        tier.trouble == "" and not tier.open_breakers and not tier.owed,
        "a tier whose medium answers is well",
    )
    _promise(list(tier.recovered()) == [], "a tier that holds nothing recovers nothing")
    tier.close()


def _check_bytes(make: Make, keys: Sequence[ChunkKey], chunk_bytes: int) -> None:
    """Bytes in, same bytes out, from and into any memory, and not one byte beside it."""
    tier = make()
    tier.recovered()
    _promise(not _holds(tier, keys[0], chunk_bytes), "a key never written is a miss")
    aligned = _aligned(chunk_bytes)
    aligned[:] = content(keys[0], chunk_bytes)
    _promise(tier.write(keys[0], aligned), "a write of page-aligned memory is True")
    _promise(aligned == content(keys[0], chunk_bytes), "a write leaves its data as it was")
    _promise(
        tier.write(keys[1], content(keys[1], chunk_bytes)),
        "a write of unaligned, read-only memory is True",
    )
    for key in (*keys[:2], *keys[:2]):
        _promise(_holds(tier, key, chunk_bytes), "what was written is found, every time")
    for start in (0, 1):
        room = memoryview(bytearray(b"\xee" * (chunk_bytes + 2 * _GUARD)))
        into = room[_GUARD + start : _GUARD + start + chunk_bytes]
        _promise(
            tier.read(keys[0], into) is True and into == aligned,
            "a read fills memory of any alignment",
        )
        beside = bytes(room[: _GUARD + start]) + bytes(room[_GUARD + start + chunk_bytes :])
        _promise(beside == b"\xee" * (2 * _GUARD), "a read touches nothing but `into`")
    _promise(tier.write(keys[0], aligned), "a second write of a held key is True")
    _promise(_holds(tier, keys[0], chunk_bytes), "a second write of a held key leaves it whole")
    tier.close()


def _check_find(make: Make, keys: Sequence[ChunkKey], chunk_bytes: int) -> None:
    tier = make()
    tier.recovered()
    _promise(
        tier.find(keys) == 0 and tier.find([]) == 0,
        "find is 0 where nothing is held, and for no keys",
    )
    before, gap, after = keys[:2], keys[2:3], keys[3:]
    _write_all(tier, [*before, *after], chunk_bytes)
    _promise(tier.find(keys) == len(before), "find stops at the first gap")
    _promise(tier.find(after) == len(after), "find counts a run that is held whole")
    _promise(tier.find([*gap, *after]) == 0, "find is 0 when the first key is not held")
    tier.close()


def _check_delete(make: Make, keys: Sequence[ChunkKey], chunk_bytes: int) -> None:
    tier = make()
    tier.recovered()
    tier.delete(keys[0])
    _write_all(tier, keys[:2], chunk_bytes)
    tier.delete(keys[0])
    _promise(
        not _holds(tier, keys[0], chunk_bytes) and tier.find(keys[:1]) == 0,
        "what was deleted is a miss",
    )
    _promise(_holds(tier, keys[1], chunk_bytes), "a delete takes no other chunk")
    _write_all(tier, keys[:1], chunk_bytes)
    _promise(_holds(tier, keys[0], chunk_bytes), "a deleted key can be written anew")
    tier.close()


def _check_names(make: Make, keys: Sequence[ChunkKey], chunk_bytes: int) -> None:
    """Keys that are nearly equal (another model's, another parent's) are other keys."""
    tier = make()
    tier.recovered()
    _write_all(tier, keys[:2], chunk_bytes)
    near = [
        ChunkKey(keys[1][:-1] + b"\xff"),
        ChunkKey(b"\xff" + keys[1][1:]),
        ChunkKey(keys[1][:16] + bytes(24)),
    ]
    for key in near:
        _promise(
            tier.find([key]) == 0 and not _holds(tier, key, chunk_bytes),
            "a key is matched whole or not at all",
        )
        tier.delete(key)
    _promise(_holds(tier, keys[1], chunk_bytes), "a delete of a nearly equal key takes nothing")
    tier.close()


def _check_owners(
    make: Make, reopen: Make | None, keys: Sequence[ChunkKey], chunk_bytes: int
) -> None:
    """A tier that keeps owners says whose a chunk is while it has it, and after a restart."""
    tier = make()
    tier.recovered()
    if not tier.keeps_owners:
        _write_all(tier, keys[:1], chunk_bytes)
        _promise(
            list(tier.owners(keys)) == [NOBODY] * len(keys),
            "a tier that keeps no owners says that its chunks are nobody's",
        )
        tier.close()
        return
    one, other = owner_of(bytes(32), "one"), owner_of(bytes(32), "other")
    whose = [one, other, NOBODY, one]
    for key, owner in zip(keys, whose, strict=False):
        _promise(
            tier.write(key, content(key, chunk_bytes), owner), "a write within capacity is True"
        )
    _promise(
        list(tier.owners(keys)) == [*whose, NOBODY, NOBODY],
        "a chunk is whose it was written for, or nobody's",
    )
    _promise(
        all(_holds(tier, key, chunk_bytes) for key in keys[:4]),
        "a chunk is whole, whose ever it is",
    )
    if tier.shared:
        found, whole = tier.held_of(tenant("one"))
        _promise(
            sorted(found) == sorted([keys[0], *keys[2:4]]) and whole,
            "held_of is the owner's and nobody's",
        )
        _promise(sorted(tier.held_of(None)[0]) == sorted(keys[:4]), "held_of None is everything")
    tier.delete(keys[1])
    _promise(
        tier.write(keys[1], content(keys[1], chunk_bytes), one), "a write within capacity is True"
    )
    whose[1] = one
    _promise(list(tier.owners(keys[:4])) == whose, "what is written anew is whose it is now")
    tier.close()
    if reopen is not None:
        again = reopen()
        again.recovered()
        _promise(
            again.keeps_owners and list(again.owners(keys[:4])) == whose,
            "a restart keeps the owners",
        )
        again.close()


def _check_capacity(make: Make, chunk_bytes: int) -> None:
    """All of ``capacity`` is there, and a delete frees its room at once (checked for small
    tiers)."""
    tier = make()
    tier.recovered()
    if tier.capacity <= _MOST_FILLED:
        keys = ChunkLayout(bytes(32), 1, 1, (chunk_bytes,)).keys([7] * (tier.capacity + 1))
        _write_all(tier, keys[:-1], chunk_bytes)
        tier.delete(keys[0])
        _write_all(tier, keys[-1:], chunk_bytes)
        _promise(
            all(_holds(tier, key, chunk_bytes) for key in keys[1:]),
            "a tier evicts nothing by itself",
        )
    tier.close()


def _check_threads(make: Make, runs: Sequence[Sequence[ChunkKey]], chunk_bytes: int) -> None:
    """Several threads, each with keys of its own."""
    tier = make()
    tier.recovered()

    def lane(keys: Sequence[ChunkKey]) -> None:
        for turn in range(16):
            key = keys[turn % 2]
            _write_all(tier, [key], chunk_bytes)
            _promise(_holds(tier, key, chunk_bytes), "threads do not disturb each other")
            tier.delete(key)
            _promise(not _holds(tier, key, chunk_bytes), "what a thread deleted is a miss for it")

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lane, runs))
    tier.close()


def _check_race(make: Make, keys: Sequence[ChunkKey], chunk_bytes: int) -> None:
    """Reads of a key while it is deleted and its room is taken by others: whole or a miss."""
    tier = make()
    tier.recovered()

    over = Event()

    def read_on() -> None:
        while not over.is_set():
            _holds(tier, keys[0], chunk_bytes)

    with ThreadPoolExecutor(_THREADS) as pool:
        readers = [pool.submit(read_on) for _ in range(_THREADS - 1)]
        try:
            for turn in range(_TURNS):
                other = keys[1 + turn % 2]
                _write_all(tier, keys[:1], chunk_bytes)
                _promise(
                    _holds(tier, keys[0], chunk_bytes),
                    "a read beside other reads finds what is held",
                )
                tier.delete(keys[0])
                _write_all(tier, [other], chunk_bytes)
                tier.delete(other)
        finally:
            over.set()
        for reader in readers:
            reader.result()
    tier.close()


def _check_restart(
    make: Make, reopen: Make, runs: Sequence[Sequence[ChunkKey]], chunk_bytes: int
) -> None:
    """What was held is held again, what was deleted is not."""
    tier = make()
    tier.recovered()
    held = [*runs[0][:4], *runs[1][:4]]
    _write_all(tier, held, chunk_bytes)
    tier.delete(held[-1])
    tier.close()
    tier = reopen()
    found = list(tier.recovered())
    _promise(
        sorted(found) == sorted(held[:-1]),
        "after a restart exactly what was held is held, each key once",
    )
    _promise(all(_holds(tier, key, chunk_bytes) for key in found), "what is recovered can be read")
    _write_all(tier, held[-1:], chunk_bytes)
    _promise(_holds(tier, held[0], chunk_bytes), "a write after a restart takes no chunk's room")
    tier.close()


def _check_restart_order(
    make: Make, reopen: Make, runs: Sequence[Sequence[ChunkKey]], chunk_bytes: int
) -> None:
    """The order given to close comes back. Keys that are not held do not matter."""
    tier = make()
    tier.recovered()
    held = [*runs[0][:4], *runs[1][:4]]
    _write_all(tier, held, chunk_bytes)
    coldest_first = [
        runs[0][3],
        runs[1][3],
        runs[1][2],
        runs[0][2],
        runs[0][1],
        runs[1][1],
        runs[1][0],
        runs[0][0],
    ]
    tier.close([runs[0][5], *coldest_first])
    tier = reopen()
    _promise(list(tier.recovered()) == coldest_first, "a restart keeps the order given to close")
    tier.close()
