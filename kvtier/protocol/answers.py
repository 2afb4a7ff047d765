"""Checks that an answer is one that a kvtier server can have given. Pure.

An engine uses these numbers when it copies. A slot or a place that does not exist would be an error
in its scheduler, or another chunk's bytes. :mod:`kvtier.protocol.wire` has checked each field by
itself. Here the fields are compared with the question. Every function raises
:class:`~kvtier.protocol.wire.WireError`, and the connection cannot be used after that.
"""

from __future__ import annotations

from kvtier.core.chunk import KEY_BYTES
from kvtier.protocol import wire


def check_number(answer: wire.Numbered, asked: int) -> None:
    """Only one question with a number is open at a time."""
    if answer.id != asked:
        raise wire.WireError(f"an answer to question {answer.id}, expected one to {asked}")


def check_lookup(answer: wire.LookupReply, chunks: int) -> None:
    """``chunks``: asked for."""
    counts = [count for count, _ in answer.steps]
    if counts != sorted(counts) or counts[-1] > chunks:
        raise wire.WireError(f"runs of {counts} chunks, expected rising numbers up to {chunks}")


def check_known(answer: wire.Known, chunks: int) -> None:
    if len(answer.each) != chunks or answer.each.strip(b"\0\1"):
        raise wire.WireError(f"{answer.each[:8].hex()}.. of {chunks} chunks, expected 0 or 1 each")


def check_slots(slots: wire.Slots, chunks: int, pool_slots: int) -> None:
    """``chunks``: to be saved."""
    if len(slots.places) != len(slots.slots):
        raise wire.WireError(f"{len(slots.slots)} slots for {len(slots.places)} chunks")
    if max(slots.places, default=0) >= max(chunks, 1) or len(set(slots.places)) < len(slots.places):
        raise wire.WireError(f"slots for other chunks than the {chunks} to be saved")
    _check_in_pool(slots, pool_slots)
    if len(set(slots.slots)) < len(slots.slots):
        raise wire.WireError("one slot for two chunks to be saved")


def check_claim(claim: wire.Claim, chunks: int, pool_slots: int, places: int) -> None:
    """``chunks`` of the lease that the engine has not been told of, ``places`` that the Welcome
    named."""
    if len(claim.sources) != len(claim.slots):
        raise wire.WireError(f"{len(claim.sources)} sources of {len(claim.slots)} chunks")
    if len(claim.slots) + claim.coming > chunks:
        raise wire.WireError(f"{len(claim.slots)} chunks and {claim.coming} to come, of {chunks}")
    if max(claim.sources, default=0) >= max(places, 1):
        raise wire.WireError(f"a chunk from place {max(claim.sources)} of {places}")
    _check_in_pool(claim, pool_slots)


def check_placed(placed: wire.Placed, chunks: int, places: int) -> None:
    if len(placed.places) > chunks:
        raise wire.WireError(f"places of {len(placed.places)} chunks, asked for {chunks}")
    if max(placed.places, default=0) >> places:
        raise wire.WireError(f"a chunk in places {max(placed.places):b} of {places}")


def check_changed(changed: wire.Changed, places: int) -> None:
    if len(changed.keys) != KEY_BYTES * len(changed.what):
        raise wire.WireError(f"{len(changed.what)} changes of {len(changed.keys)} bytes of keys")
    if max(changed.what, default=0) >= 2 * max(places, 1):
        raise wire.WireError(f"a change of place {max(changed.what) // 2} of {places}")


def _check_in_pool(answer: wire.Slots | wire.Claim, pool_slots: int) -> None:
    last = max((*answer.slots, *(slot for slot, _ in answer.renewed)), default=0)
    if last >= pool_slots:
        raise wire.WireError(f"slot {last} of a pool of {pool_slots}")
