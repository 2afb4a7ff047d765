"""Record: prompts and hints wait in a bounded queue, and become lines of a trace, in files that
follow each other.

The lines are in the form of public traces, with more fields, and with salted 64-bit ids instead of
keys and names. A caller that notes something never waits. The folder, which has the salt, has one
owner at a time, and must be this user's alone (:mod:`kvtier.tiers.own_folder`): a trace says when
who asked how much. Files of other names are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane
from kvtier.core.lookup import STOPS, Asker, Ended
from kvtier.eviction.hints import Hint
from kvtier.store.observer import Observer
from kvtier.tiers.own_folder import OwnFolder

logger = logging.getLogger("kvtier")

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


# ---- its files -----------------------------------------------------------------------------------

FILES = "requests-*.jsonl"
_OURS = re.compile(r"requests-[0-9]{15}\.jsonl")
_FILE_BYTES, _FILE_S = 64 << 20, 3600.0
_MOST_BYTES = 1 << 30


class FilePosition(NamedTuple):
    name: str
    is_new: bool
    leaving: list[str]
    """Names of files that are removed first."""


class Rotation:
    """Order of the files: which one is next, and which ones leave. Pure. ``found``: names and sizes
    of the files that are there, the oldest first. One that is larger than ``file_bytes``, or older
    than ``file_s``, is ended. ``most_bytes``: the bound of all together."""

    def __init__(
        self,
        found: list[tuple[str, int]],
        file_bytes: int = _FILE_BYTES,
        file_s: float = _FILE_S,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._ended = found
        self._file_bytes, self._file_s, self._most_bytes = file_bytes, file_s, most_bytes
        self._name, self._size, self._begun = "", 0, 0.0

    def place(self, now: float, count: int) -> FilePosition:
        """Return the file for ``count`` bytes at ``now``, in seconds since 1970."""
        full = self._size + count > self._file_bytes
        is_new = not self._name or full or not 0 <= now - self._begun < self._file_s
        if is_new:
            self.end()
            self._name, self._begun = self._name_of(now), now
        leaving = []
        while self._ended and self._held + self._size + count > self._most_bytes:
            leaving.append(self._ended.pop(0)[0])
        return FilePosition(self._name, is_new, leaving)

    def wrote(self, count: int) -> None:
        self._size += count

    def end(self) -> None:
        if self._size:
            self._ended.append((self._name, self._size))
        self._name, self._size = "", 0

    @property
    def _held(self) -> int:
        return sum(size for _, size in self._ended)

    def _name_of(self, now: float) -> str:
        """Return a name that sorts behind all earlier ones, also when the clock was set back."""
        name = FILES.replace("*", f"{int(now * 1000):015d}")
        last = self._ended[-1][0] if self._ended else ""
        if name > last:
            return name
        number = int(last.removeprefix("requests-").removesuffix(".jsonl")) + 1
        return FILES.replace("*", f"{number:015d}")


class RecordFolder:
    """The folder of one recorder, locked until :meth:`close`. Raises ConfigError, which says what
    to do, when it cannot be written, or is not this user's alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        try:
            with self.opened(make=True) as folder:
                self._lock = folder.open("salt", os.O_RDWR, make=True)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.salt = os.read(self._lock, SALT_BYTES)
            if len(self.salt) < SALT_BYTES:
                self.salt = os.urandom(SALT_BYTES)
                os.pwrite(self._lock, self.salt, 0)
            with os.scandir(path) as entries:
                found = sorted(
                    (entry.name, entry.stat(follow_symlinks=False).st_size)
                    for entry in entries
                    if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                )
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"record={path}: somebody else records there: give each engine or server a folder "
                "of its own"
            ) from error
        except OSError as error:
            self.close()
            raise ConfigError(
                f"record={path} cannot be written: {error}; give a folder that this user may "
                "write, or remove record"
            ) from error
        self.rotation = Rotation(found)

    def opened(self, *, make: bool = False) -> OwnFolder:
        """Open the folder, if it is this user's alone. Raises ConfigError and OSError."""
        return OwnFolder(self.path, f"record={self.path}", ConfigError, make=make)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def record_folder(path: str, replica: int = 0) -> Path:
    """Return the folder of an engine's replica: each has its own."""
    return Path(path) / f"replica{replica}" if replica else Path(path)


class RecordWriter:
    """Writer of a recorder's notes into its folder. One thread. ``clock``: seconds since 1970."""

    def __init__(
        self, recorder: Recorder, folder: RecordFolder, clock: Callable[[], float] = time.time
    ) -> None:
        self._recorder, self._folder, self._clock = recorder, folder, clock
        self._file = -1
        self._path = folder.path
        self._size = 0
        self.trouble = ""
        """Fault in words, or empty if nothing is wrong now."""

    def write_all(self) -> None:
        """Write all notes that wait. Logs once that this fails, and once that it works again."""
        while (batch := self._recorder.take()).lines:
            before, self.trouble = self.trouble, ""
            try:
                self._write(batch)
            except Exception as error:  # noqa: BLE001 - it costs lines, and never the recording
                self._undo()
                self.trouble = f"nothing is recorded in {self._folder.path}: {error}"
            if self.trouble and not before:
                logger.warning("%s", self.trouble)
            elif before and not self.trouble:
                logger.info("recording in %s again", self._folder.path)
            self._recorder.ended(batch, written=not self.trouble)

    def close(self) -> None:
        self._recorder.release()
        self.write_all()
        self._end()
        self._folder.close()

    def _write(self, batch: Batch) -> None:
        rotation, path = self._folder.rotation, self._folder.path
        place = rotation.place(self._clock(), len(batch.data))
        if place.is_new or place.leaving:
            with self._folder.opened() as folder:
                for name in place.leaving:
                    folder.remove(name)
                if place.is_new:
                    self._end()
                    self._path, self._size = path / place.name, 0
                    self._file = folder.open(place.name, os.O_WRONLY | os.O_APPEND, make=True)
        if not place.is_new:
            self._path.stat()  # a removed file would lose its lines
        done = 0
        while done < len(batch.data):
            done += os.write(self._file, batch.data[done:])
        self._size += done
        rotation.wrote(done)

    def _undo(self) -> None:
        """Cut off a line that was written in part. The next lines go into another file."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                if not self._size:
                    self._path.unlink()
        self._end()
        self._folder.rotation.end()

    def _end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_on_lane(recorder: Recorder, writer: RecordWriter, lane: Lane) -> None:
    """Write on ``lane``, which has one thread and is this recorder's alone."""

    def close(timeout_s: float) -> bool:
        clean = lane.close(timeout_s)
        if clean:
            writer.close()
        return clean

    recorder.on_note = lambda: lane.submit(writer.write_all)
    recorder.on_close = close
