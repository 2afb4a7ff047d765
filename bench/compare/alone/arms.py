"""The arms that are measured without an engine, and how each one's process is started, asked and
ended."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvtier.bench.compare.alone import kvtier_arms as ours
from kvtier.bench.compare.alone.arm import (
    DURABLE,
    LOAD,
    MATCH_HIT,
    MATCH_MISS,
    SAVE,
    WRITE,
    Setting,
    Sizes,
)
from kvtier.bench.compare.limits import DISK_READ, DISK_WRITE, MEMCPY, REDIS_TCP, REDIS_UNIX
from kvtier.bench.compare.peers.contenders import CONTENDERS, Contender
from kvtier.bench.micro.server import server
from kvtier.core.errors import KVTierError

_KVTIER, _LMCACHE = (
    "kvtier.bench.compare.alone.kvtier_arms",
    "kvtier.bench.compare.alone.lmcache_arms",
)
_OUR_COPIES = "its copier for CPU tensors is ours, as it has none"
_RAM = {SAVE: MEMCPY, LOAD: MEMCPY}
_DISK = {SAVE: MEMCPY, WRITE: DISK_WRITE, DURABLE: DISK_WRITE, LOAD: DISK_READ}
_UNIX = {SAVE: MEMCPY, WRITE: REDIS_UNIX.replace("GET", "SET"), LOAD: REDIS_UNIX}
_TCP = {SAVE: MEMCPY, WRITE: REDIS_TCP.replace("GET", "SET"), LOAD: REDIS_TCP}
_KEEP_MEMORY = dict.fromkeys(
    ("MALLOC_CONF", "JE_MALLOC_CONF"), "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)
"""For Redis, under both names that its allocator may have. Memory that is deleted between rounds is
used again, as in a full Redis. Pages that went back to the system cost a virtual machine seconds a
GiB."""
_ANSWER_S, _END_S = 180.0, 10.0
_REASON_CHARACTERS = 400


class ArmError(KVTierError):
    """An arm's process ended or gave no answer. The message is the end of its log."""


Place = Callable[[Path, Sizes], AbstractContextManager[tuple[str, int | None]]]
"""Opens the place where an arm keeps chunks, for a block: its folder or address, and the process
whose CPU time counts for the arm too."""


@contextmanager
def _nowhere(folder: Path, sizes: Sizes) -> Iterator[tuple[str, None]]:
    yield "", None


@contextmanager
def _folder(folder: Path, sizes: Sizes) -> Iterator[tuple[str, None]]:
    place = (folder / "disk").resolve()
    place.mkdir()
    yield str(place), None


@contextmanager
def _redis(folder: Path, sizes: Sizes, *, tcp: bool) -> Iterator[tuple[str, int]]:
    from kvtier.bench.processes.redis_server import redis_server

    with redis_server(_KEEP_MEMORY) as (port, path, pid):
        yield f"redis://127.0.0.1:{port}" if tcp else f"unix://{path}", pid


@contextmanager
def _server(folder: Path, sizes: Sizes) -> Iterator[tuple[str, int]]:
    with server(ours.ram_bytes(sizes, sizes.chunk_bytes)) as (path, pid):
        yield f"unix://{path}", pid


@dataclass(frozen=True, slots=True)
class Arm:
    """``like``: the arm in whose environment it runs, and whose obstacles it has. ``limits``: what
    the machine can do at best, by metric. ``asked``: milliseconds that kvtier asks of itself, by
    metric."""

    name: str
    about: str
    like: Contender
    module: str = ""
    place: str = ""
    open: Place = _nowhere
    limits: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    cannot: str = ""

    @property
    def obstacle(self) -> str:
        """Why it cannot run here. Empty when it can."""
        return self.cannot or self.like.obstacle


_LIKE, _LIKE_LMCACHE = CONTENDERS["kvtier-ram"], CONTENDERS["lmcache-ram"]
ARMS = {
    one.name: one
    for one in (
        Arm(
            "kvtier-ram",
            "kvtier embedded, RAM",
            _LIKE,
            _KVTIER,
            ours.RAM,
            limits=_RAM,
            asked={MATCH_HIT: 0.15, MATCH_MISS: 0.15},
        ),
        Arm("kvtier-nvme", "kvtier embedded, NVMe", _LIKE, _KVTIER, ours.NVME, _folder, _DISK),
        Arm(
            "kvtier-redis",
            "kvtier embedded, Redis, Unix socket",
            _LIKE,
            _KVTIER,
            ours.REDIS,
            partial(_redis, tcp=False),
            _UNIX,
        ),
        Arm(
            "kvtier-redis-tcp",
            "kvtier embedded, Redis, TCP",
            _LIKE,
            _KVTIER,
            ours.REDIS,
            partial(_redis, tcp=True),
            _TCP,
        ),
        Arm(
            "kvtier-server",
            ("a kvtier server's RAM, by its Unix socket"),
            _LIKE,
            _KVTIER,
            ours.SERVER,
            _server,
            _RAM,
            {MATCH_HIT: 0.3, MATCH_MISS: 0.3},
        ),
        Arm(
            "lmcache-ram",
            "LMCache in one process, RAM",
            _LIKE_LMCACHE,
            _LMCACHE,
            "ram",
            limits=_RAM,
            note=_OUR_COPIES,
        ),
        Arm(
            "lmcache-disk",
            ("LMCache in one process, disk with direct I/O"),
            _LIKE_LMCACHE,
            _LMCACHE,
            "disk",
            _folder,
            _DISK,
            note=_OUR_COPIES,
        ),
        Arm(
            "lmcache-redis",
            ("LMCache in one process, Redis by redis-py, TCP"),
            _LIKE_LMCACHE,
            _LMCACHE,
            "redis",
            partial(_redis, tcp=True),
            _TCP,
            note=_OUR_COPIES,
        ),
        Arm(
            "lmcache-redis-native",
            ("LMCache in one process, Redis by its native client"),
            _LIKE_LMCACHE,
            cannot=CONTENDERS["lmcache-redis-native"].cannot,
        ),
        Arm(
            "vllm-offloading",
            "vLLM's OffloadingConnector",
            _LIKE,
            cannot=("it has no surface without vLLM's engine"),
        ),
    )
}


class Asked:
    """One arm's process. It answers one question at a time."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self) -> None:
        """Measure once more."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says what its log says
            self._process.stdin.write("again\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """What was measured: the value of each metric. Raises ArmError."""
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], _ANSWER_S)[0]:
            raise ArmError(f"no answer in {_ANSWER_S:.0f} s")
        if said := out.readline():
            return dict(json.loads(said))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        ended = [
            line
            for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        raise ArmError((ended or ["it ended without a word"])[-1][:_REASON_CHARACTERS])


@contextmanager
def running(arm: Arm, sizes: Sizes, folder: Path) -> Iterator[Asked]:
    """The arm's process and its companion, for the block. Its first answer, the warm-up, comes
    without a question.

    ``folder``: a new one on the disk that is measured. Raises KVTierError, OSError.
    """
    folder.mkdir(parents=True)
    env = [f"{name}={value}" for name, value in arm.like.env.items() if "{" not in value]
    with ExitStack() as ends:
        at, beside = ends.enter_context(arm.open(folder, sizes))
        log = ends.enter_context((folder / "log").open("wb"))
        command = [
            "env",
            *env,
            arm.like.interpreter,
            "-m",
            arm.module,
            Setting(arm.place, at, beside, sizes).told(),
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        ends.callback(_end, process)
        yield Asked(process, folder / "log")


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()
