"""Recorder: prompts and hints wait in a bounded queue, and become lines of a trace.

The lines are in the form of public traces, with more fields, and with salted 64-bit ids instead of
keys and names. A caller that notes something never waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import STOPS, Asker, Ended
from kvtier.eviction.hints import Hint
from kvtier.store.observer import Observer

SALT_BYTES = 32
_ID_BYTES = 8
_WAITING_NOTES = 4096
_MOST_KEYS = 1 << 18
"""Most keys that wait: 24 MiB together."""
_OPEN_PROMPTS, _LONGEST_OPEN_S = 1024, 600.0
"""Most prompts whose requests have not ended, and their greatest age. Their lines are written when
the end is known, and without it beyond these bounds."""
_TURN_BYTES = 1 << 18
"""Bytes of the lines that are made at once."""


class _Item(NamedTuple):
    at: float
    run: Sequence[ChunkKey]
    asker: Asker
    hint: Hint | None = None
    ended: Ended | None = None
    """End of a prompt's request, if known."""


class Batch(NamedTuple):
    data: bytes
    lines: int


class Recorder(Observer):
    """Queue of one process's notes. One thread at a time calls :meth:`take`. ``salt``: of the
    folder that is written to. ``clock``: seconds since 1970."""

    def __init__(self, salt: bytes, clock: Callable[[], float] = time.time) -> None:
        self._salt, self._clock = salt, clock
        self._waiting: deque[_Item] = deque()
        self._open: OrderedDict[int, _Item] = OrderedDict()
        """Request's number -> prompt. :attr:`_lock` guards it, for a step in memory only."""
        self._lock = threading.Lock()
        self._noted_keys = self._taken_keys = 0
        self.on_note: Callable[[], object] = lambda: None
        """Called after each note. It must not wait."""
        self.on_close: Callable[[float], bool] = super().close
        """Called when a Store that has this observer ends."""
        self.counts: Counter[str] = Counter(recorded=0, unrecorded=0)
        """Lines. ``unrecorded``: the queue was full, or the folder could not be written."""

    def prompt(self, run: Sequence[ChunkKey], asker: Asker) -> None:
        if run and self._has_room(run):
            item = _Item(self._clock(), tuple(run), asker)
            with self._lock:
                left = self._open.pop(asker.request, None)
                if asker.request:
                    self._open[asker.request] = item
                    if len(self._open) > _OPEN_PROMPTS:
                        _, left = self._open.popitem(last=False)
            for each in (left, None if asker.request else item):
                if each is not None:
                    self._note(each)

    def finished(self, ended: Ended) -> None:
        with self._lock:
            item = self._open.pop(ended.request, None)
        if item is not None:
            self._note(item._replace(ended=ended))

    def release(self, older_s: float = 0.0) -> None:
        """Note prompts that are at least ``older_s`` old, without their requests' ends."""
        until = self._clock() - older_s
        with self._lock:
            old = [number for number, item in self._open.items() if item.at <= until]
            items = [self._open.pop(number) for number in old]
        for item in items:
            self._note(item)

    def hint(self, run: Sequence[ChunkKey], session: str, hint: Hint) -> None:
        if self._has_room(run):
            self._note(_Item(self._clock(), tuple(run), Asker(session), hint))

    def counted(self) -> Mapping[str, int]:
        return self.counts

    def close(self, timeout_s: float) -> bool:
        return self.on_close(timeout_s)

    def _has_room(self, run: Sequence[ChunkKey]) -> bool:
        keys = self._noted_keys - self._taken_keys
        if len(self._waiting) >= _WAITING_NOTES or keys >= _MOST_KEYS:
            self.counts["unrecorded"] += 1
            return False
        self._noted_keys += len(run)
        return True

    def _note(self, item: _Item) -> None:
        self._waiting.append(item)
        self.on_note()

    def take(self) -> Batch:
        """Return the next lines. Their writer calls :meth:`ended`."""
        self.release(_LONGEST_OPEN_S)
        lines, size = list[bytes](), 0
        while self._waiting and size < _TURN_BYTES:
            item = self._waiting.popleft()
            self._taken_keys += len(item.run)
            lines.append(msgspec.json.encode(self._document(item)) + b"\n")
            size += len(lines[-1])
            time.sleep(0)  # others wait for the interpreter
        return Batch(b"".join(lines), len(lines))

    def ended(self, batch: Batch, *, written: bool) -> None:
        self.counts["recorded" if written else "unrecorded"] += batch.lines

    def _document(self, item: _Item) -> dict[str, object]:
        ids, asker = [self._id(key) for key in item.run], item.asker
        document: dict[str, object] = {"timestamp": round(item.at * 1000), "whole": True}
        if asker.tokens:
            document["input_length"] = asker.tokens
        if asker.session:
            document["session"] = f"{self._id(asker.session.encode()):016x}"
        if item.ended is not None:
            document["output_length"] = item.ended.tokens
            document["stop"] = item.ended.stop if item.ended.stop in STOPS else STOPS[-1]
        if item.hint is None:
            return {**document, "hash_ids": ids}
        document |= {"over": item.hint.over, "keep_s": item.hint.keep_s, "about": ids}
        return {**document, "input_length": 0, "output_length": 0, "hash_ids": []}

    def _id(self, name: bytes) -> int:
        digest = blake2b(name, key=self._salt, digest_size=_ID_BYTES).digest()
        return int.from_bytes(digest, "big")
