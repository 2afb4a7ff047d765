"""Digests of whole files, kept from one start to the next.

Every byte counts, so the first start with new files reads them once, in several threads. The
digest of a file of 1 MiB or more is kept under ``$XDG_CACHE_HOME/kvtier/digests`` by the file's
device, inode, size, and times of modification and change, so a second start only asks the file
system. A record that is damaged, not this user's, or of another machine counts as none.

The name of a blob in a hub's cache is not trusted: whoever edits the file leaves its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from pathlib import Path

from kvtier.core.lanes import Lane
from kvtier.core.processes import environment

_THREADS = 8
_READ_BYTES = 1 << 20
_KEPT_FROM_BYTES = 1 << 20
_RECORD_BYTES = 1024
_MOST_RECORDS = 4096
_MOST_FILES = 4096
_MOST_BEGUN_FILES = 1024
_SETTLED_S = 2.0
"""Age that a file must have when read for its digest to be kept: a younger one could change again
within the same tick of a coarse clock."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_DOES_NOT = re.compile(
    r"""
    config\.json|params\.json                               # named as vLLM resolved them
    |generation_config\.json|.*tokenizer.*\.(json|model|jinja)|tokenizer\.\w+|tekken\.json
    |(special_tokens_map|added_tokens|vocab|chat_template\w*)\.\w+|merges\.txt|.*\.(tiktoken|jinja)
    |.*\.(md|rst|pdf|png|jpe?g|gif|svg|webp|ipynb|log|lock|metadata|incomplete)
    |(README|LICEN[CS]E|NOTICE|USE_POLICY).*
    |(optimizer|scheduler|rng_state|training_args|trainer_state).*|.*\.(onnx|h5|msgpack|ot|tflite)
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Files that do not decide a chunk's bytes: tokens are in its name, and people, trainers or other
frameworks read the rest."""


class DigestError(Exception):
    """A file cannot be named by its content. The text says which, and why."""


def content_files(place: Path, *, configured: bool = True) -> list[Path]:
    """Return the sorted files at ``place`` that decide: all of a folder and below, but for hidden
    ones, :data:`_DOES_NOT`, and weights below. ``configured``: vLLM's configuration object names
    config.json. Raises DigestError for a folder that cannot be listed or has more than 4,096."""
    if place.is_file():
        return [place]
    found = list[Path]()
    problems = list[OSError]()
    for folder, folders, names in os.walk(place, onerror=problems.append):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        is_top = Path(folder) == place
        for name in sorted(names):
            decides = not _DOES_NOT.fullmatch(name) or (name == "config.json" and not configured)
            if name.startswith(".") or not decides:
                continue
            if is_top or not name.endswith(_WEIGHTS):
                found.append(Path(folder, name))
        if len(found) > _MOST_FILES:
            raise DigestError(f"{place} has more than {_MOST_FILES:,} files")
    if problems:
        raise DigestError(f"{place} cannot be listed: {problems[0]}")
    return sorted(found)


def has_weights(files: Iterable[Path]) -> bool:
    return any(file.suffix in _WEIGHTS for file in files)


def stamp(files: Iterable[Path]) -> list[tuple[int | str, ...]]:
    return [(file.name, *_identity(os.stat(file))) for file in files]


class FileDigests:
    """Makes digests of files in a lane of its own. Thread-safe.

    Args:
        folder: where digests are kept. None: the user's cache folder.
        clock: seconds since the epoch, as files have them.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._folder = _cache_folder() if folder is None else folder
        self._clock = clock
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        """Drop what a parent process has begun: a forked one has no thread that would end it."""
        self._lock = threading.Lock()
        self._begun: dict[tuple[tuple[str, ...], str], Future[str]] = {}
        self._lane: Lane | None = None

    def begin(self, files: Sequence[Path], base: Path) -> Future[str]:
        """Begin the hex digest of names below ``base`` and contents, made once for files as they
        are now. The Future raises DigestError, as does this when a file is not there."""
        try:
            state = json.dumps(stamp(files))
        except OSError as error:
            raise DigestError(str(error)) from None
        key = (tuple(map(str, files)), state)
        with self._lock:
            if key not in self._begun:
                if len(self._begun) == _MOST_BEGUN_FILES:
                    del self._begun[next(iter(self._begun))]
                self._begun[key] = found = Future[str]()
                names = [
                    file.name if file == base else str(file.relative_to(base)) for file in files
                ]
                self._gather(dict(zip(files, names, strict=True)), found)
            return self._begun[key]

    def _gather(self, names: Mapping[Path, str], whole: Future[str]) -> None:
        digests = dict[str, str]()

        def read(file: Path) -> None:
            if whole.done():
                return
            try:
                digest = self._digest(file)
            except (DigestError, OSError) as error:
                with contextlib.suppress(InvalidStateError):
                    whole.set_exception(DigestError(_words(file, error)))
                return
            with self._lock:
                digests[names[file]] = digest
                is_last = len(digests) == len(names)
            if is_last:
                whole.set_result(_of_all(digests))

        if not names:
            whole.set_result(_of_all({}))
        if self._lane is None:
            bound = 2 * _MOST_FILES
            self._lane = Lane("digest", _THREADS, urgent_bound=0, bound=bound)
        for file in sorted(names, key=lambda one: one.stat().st_size, reverse=True):
            if not self._lane.submit(partial(read, file)):
                whole.set_exception(DigestError(f"{file} waits behind too many others"))
                return

    # ---- one file ------------------------------------------------------------------------------

    def _digest(self, file: Path) -> str:
        with file.open("rb", buffering=0) as stream:
            before = os.fstat(stream.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise DigestError(f"{file} is no file")
            if before.st_size < _KEPT_FROM_BYTES or not before.st_ino or self._folder is None:
                return self._read(file, stream.fileno(), before)
            record = self._folder / f"{before.st_dev:x}-{before.st_ino:x}"
            with self._alone(record) as may_keep:
                kept = self._kept(record, before)
                if kept:
                    return kept
                begun = self._clock()
                digest = self._read(file, stream.fileno(), before)
                settled = begun - max(before.st_mtime, before.st_ctime) >= _SETTLED_S
                if may_keep and settled:
                    self._keep(record, before, digest)
                return digest

    def _read(self, file: Path, descriptor: int, before: os.stat_result) -> str:
        """Return the SHA-256 of the whole content. Raises DigestError when it changed meanwhile."""
        digest, buffer, left = hashlib.sha256(), bytearray(_READ_BYTES), before.st_size
        with memoryview(buffer) as view:
            while left > 0 and (count := os.readv(descriptor, [view])):
                digest.update(view[:count])
                left -= count
        if _identity(os.fstat(descriptor)) != _identity(before):
            raise DigestError(f"{file} changed while it was read")
        return digest.hexdigest()

    # ---- records -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, record: Path) -> Iterator[bool]:
        """Hold the record alone: of two engines that start at once the second waits for the first,
        so that a digest is made once. Yields whether records can be written."""
        assert self._folder is not None
        lock = None
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_own(self._folder):
                place = record.with_suffix(".lock")
                lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if lock is None:
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield True
        finally:
            with contextlib.suppress(OSError):
                place.unlink()
            os.close(lock)

    def _kept(self, record: Path, found: os.stat_result) -> str:
        assert self._folder is not None
        try:
            if not (_is_own(self._folder) and _is_own(record)):
                return ""
            with record.open("rb") as stream:
                told = json.loads(stream.read(_RECORD_BYTES))
            digest = told["sha256"]
            is_whole = told["check"] == _check(told["file"], told["machine"], digest)
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        is_same = told["file"] == [*_identity(found)] and told["machine"] == _machine()
        return str(digest) if is_whole and is_same else ""

    def _keep(self, record: Path, found: os.stat_result, digest: str) -> None:
        file, machine = [*_identity(found)], _machine()
        told = {
            "file": file,
            "machine": machine,
            "sha256": digest,
            "check": _check(file, machine, digest),
        }
        new = record.with_suffix(f".{os.getpid()}.new")
        with contextlib.suppress(OSError):
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as stream:
                json.dump(told, stream)
            new.replace(record)
            _forget_oldest(record.parent)


def _of_all(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def _words(file: Path, error: Exception) -> str:
    return str(error) if isinstance(error, DigestError) else f"{file}: {error}"


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _check(file: list[int], machine: str, digest: str) -> str:
    return hashlib.sha256(json.dumps([file, machine, digest]).encode()).hexdigest()


def _is_own(place: Path) -> bool:
    found = os.lstat(place)
    return (
        found.st_uid == os.geteuid()
        and not found.st_mode & 0o022
        and not stat.S_ISLNK(found.st_mode)
    )


def _forget_oldest(folder: Path) -> None:
    records = [one for one in folder.iterdir() if not one.suffix]
    if len(records) > _MOST_RECORDS:
        records.sort(key=lambda one: one.stat().st_mtime)
        for record in records[: len(records) - _MOST_RECORDS]:
            record.unlink(missing_ok=True)


def _machine() -> str:
    for place in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return Path(place).read_text(encoding="ascii", errors="replace").strip()[:64]
    return ""


def _cache_folder() -> Path | None:
    root = environment().get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.cache")
    return Path(root) / "kvtier" / "digests" if os.path.isabs(root) else None
