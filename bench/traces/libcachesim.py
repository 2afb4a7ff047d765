"""libCacheSim's traces: accesses to objects, as comma-separated values and in its binary form
oracleGeneral (https://github.com/1a1a11a/libCacheSim). Each access is a prompt of one chunk. Sizes
of objects are not read, so each takes one slot, as with libCacheSim's ``--ignore-obj-size``.
"""

from __future__ import annotations

import csv
import struct
from collections.abc import Iterable, Iterator
from functools import cache

from kvtier.bench.traces.mooncake import Request, key_of, seconds
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError

RECORD = struct.Struct("<IQIq")
"""Time in seconds, the object's id, its size, and the number of its next access."""
TIMES = ("time", "clock_time", "timestamp")
IDS = ("obj_id", "object_id", "object", "id", "key", "lbn")
"""Names of columns. Without a header the first column is the time, and the second is the id."""


def read_csv(lines: Iterable[str]) -> Iterator[Request]:
    """Raises ConfigError, which names the line."""
    run, time_at, id_at, number = cache(_run), 0, 1, 0
    try:
        for number, row in enumerate(csv.reader(lines, skipinitialspace=True), 1):
            if number == 1 and (names := header(row)):
                time_at = next((names.index(name) for name in TIMES if name in names), 0)
                id_at = next(names.index(name) for name in IDS if name in names)
            elif row:
                yield Request(seconds(float(row[time_at])), run(row[id_at].strip()))
    except (ValueError, IndexError, csv.Error) as error:
        raise ConfigError(
            f"line {number}: no access with a time and an object's id: {repr(error)[:200]}. "
            f"Expected a header with one of {', '.join(TIMES)} and one of {', '.join(IDS)}, or the "
            "time in the first column and the id in the second"
        ) from error


def header(row: list[str]) -> list[str] | None:
    """The columns' names, if this row has them."""
    names = [cell.strip().lstrip("# ").lower().replace("-", "_") for cell in row]
    return names if any(name in names for name in IDS) else None


def read_oracle_general(data: bytes) -> Iterator[Request]:
    """Raises ConfigError for bytes that are not whole records."""
    if len(data) % RECORD.size:
        raise ConfigError(
            f"{len(data):,} bytes are not whole records of {RECORD.size} bytes (oracleGeneral)"
        )
    run = cache(_run)
    for at, name, _, _ in RECORD.iter_unpack(data):
        yield Request(float(at), run(name))


def _run(name: str | int) -> tuple[ChunkKey]:
    return (key_of(name),)
