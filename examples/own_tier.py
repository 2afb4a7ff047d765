"""A tier of your own: chunks in a SQLite file, warm after a restart.

``python examples/own_tier.py`` checks the promises of a tier, and then puts this one below a small
RAM. kvtier never asks a tier to hold more than ``capacity`` and never writes a chunk twice at once.
It believes what a tier says: a read that is True has to be exactly what was written.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from kvtier import ChunkKey, ChunkLayout, Store
from kvtier.core.chunk import fingerprint
from kvtier.core.pool import Pool
from kvtier.core.tenant import UNOWNED
from kvtier.testing import ManualLane, check_tier
from kvtier.tiers.base import Tier

CHUNK_BYTES = 64 * 1024


class SqliteTier(Tier):
    """One connection, and one lock: the lane's threads take turns."""

    name = "sqlite"

    def __init__(self, file: Path, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._db = sqlite3.connect(file, check_same_thread=False)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS chunk"
            " (key BLOB PRIMARY KEY, data BLOB, checksum BLOB, place INTEGER)"
        )

    def recovered(self) -> Sequence[ChunkKey]:
        with self._lock:
            return [
                ChunkKey(row[0]) for row in self._db.execute("SELECT key FROM chunk ORDER BY place")
            ]

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        row = (bytes(key), data, xxhash.xxh3_128_digest(data))
        try:
            with self._lock, self._db:
                self._db.execute("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, NULL)", row)
        except sqlite3.Error:  # a full disk, for example: the chunk is not held
            return False
        return True

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        query = "SELECT data, checksum FROM chunk WHERE key = ?"
        try:
            with self._lock:
                row = self._db.execute(query, (bytes(key),)).fetchone()
        except sqlite3.Error:
            return None
        if row is None:
            return False
        data, checksum = row
        if len(data) != len(into) or xxhash.xxh3_128_digest(data) != checksum:
            self.delete(key)
            return False
        into[:] = data
        return True

    def find(self, keys: Sequence[ChunkKey]) -> int:
        query = "SELECT 1 FROM chunk WHERE key = ?"
        with self._lock:
            held = (self._db.execute(query, (bytes(key),)).fetchone() for key in keys)
            return next((at for at, row in enumerate(held) if row is None), len(keys))

    def delete(self, key: ChunkKey) -> None:
        with self._lock, self._db:
            self._db.execute("DELETE FROM chunk WHERE key = ?", (bytes(key),))

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        with self._lock, self._db:
            places = ((place, bytes(key)) for place, key in enumerate(coldest_first))
            self._db.executemany("UPDATE chunk SET place = ? WHERE key = ?", places)
        self._db.close()


def keeps_its_promises(folder: Path) -> None:
    """Raises AssertionError with the promise that is broken."""
    number = 0

    def reopen() -> Tier:
        return SqliteTier(folder / f"{number}.db", capacity=64)

    def make() -> Tier:
        nonlocal number
        number += 1
        return reopen()

    check_tier(make, chunk_bytes=CHUNK_BYTES, reopen=reopen)


def below_ram(folder: Path) -> int:
    """Two prompts of four chunks, RAM for four. Returns how many chunks of the first come back."""
    layout = ChunkLayout(fingerprint({"model": "example"}), 1, 1, (CHUNK_BYTES,))
    first, second = layout.keys([1, 2, 3, 4]), layout.keys([5, 6, 7, 8])
    lane = ManualLane()  # a Lane with threads, in a server or an engine
    store = Store(Pool(4, CHUNK_BYTES), [(SqliteTier(folder / "store.db", capacity=64), lane)])
    for run in (first, second):
        with store.save(run) as save:
            save.commit()  # an engine fills save.slots before
        lane.run()
    with store.load(first) as load:
        lane.run()
        ready = load.poll().ready
    store.close()
    return ready


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        keeps_its_promises(Path(place))
        print(f"every promise is kept; {below_ram(Path(place))} of 4 chunks came back from SQLite")
