"""Chunks over one wire: parts and header in the order that makes a torn chunk a miss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from xxhash import xxh3_128

from kvtier.core.chunk import ChunkKey
from kvtier.tiers.redis.errors import RefusedError, WrongSizeError
from kvtier.tiers.redis.layout import HEADER_BYTES, Form
from kvtier.tiers.redis.wire import Wire

TTL_GRACE_MS = 10_000


def put_chunk(
    wire: Wire, form: Form, owned: tuple[ChunkKey, int], data: memoryview, ttl_ms: int | None
) -> RefusedError | None:
    """Write the parts, then the header. On a refusal the parts are removed."""
    key, owner = owned
    digest = xxh3_128(key)

    def parts() -> Iterator[tuple[bytes, memoryview]]:
        for name, part in zip(form.part_names(key, data.nbytes), form.split(data), strict=True):
            digest.update(part)
            yield name, part

    # Parts outlive their header, so that a chunk whose time is over is a miss and not a torn chunk.
    refusal = wire.put(parts(), None if ttl_ms is None else ttl_ms + TTL_GRACE_MS)
    if refusal is None:
        header = memoryview(form.header(key, data.nbytes, digest.digest(), owner))
        refusal = wire.put([(form.header_name(key), header)], ttl_ms)
    if refusal is not None:
        wire.ask([("UNLINK", *form.names(key, data.nbytes))])
    return refusal


def get_chunk(wire: Wire, form: Form, key: ChunkKey, into: memoryview) -> str:
    """Read header and parts. Returns the name of the event that the read counts as."""
    header = memoryview(bytearray(HEADER_BYTES))
    digest = xxh3_128(key)
    parts, checksum = form.split(into), None
    come = 0
    try:
        with closing(wire.get(form.names(key, into.nbytes), [header, *parts])) as memories:
            for memory in memories:
                if come:
                    digest.update(memory)
                elif (checksum := form.checksum(bytes(header), key, into.nbytes)) is None:
                    return "corrupt"
                come += 1
    except WrongSizeError:
        return "corrupt"
    if come == 0:
        return "misses"
    if come <= len(parts):
        return "evicted" if _is_torn(wire, form, key, into.nbytes) else "misses"
    if checksum == digest.digest():
        return "reads"
    return "corrupt" if _is_still(wire, form, key, header) else "misses"


def _is_still(wire: Wire, form: Form, key: ChunkKey, header: memoryview) -> bool:
    """Return whether the stored header is still this one. If not, the chunk was written anew during
    the read and must not be dropped: encryption gives each write other bytes."""
    (now,) = wire.ask([("GET", form.header_name(key))])
    return bool(now == header)


def _is_torn(wire: Wire, form: Form, key: ChunkKey, length: int) -> bool:
    """Return whether there is a header without one of its parts. If not, the chunk was deleted, and
    maybe written anew, during the read and must not be dropped. EXISTS counts a name as often as it
    is given, so one command, which is one moment, tells header and parts apart by the sum."""
    parts = form.part_names(key, length)
    (count,) = wire.ask([("EXISTS", *[form.header_name(key)] * (len(parts) + 1), *parts)])
    return isinstance(count, int) and len(parts) < count < 2 * len(parts) + 1
