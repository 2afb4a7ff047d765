"""The rounds of one arm: fill, query, and in the comparison's last round a mixed one and the engine's restart.

Requests are asked one at a time. What counts for the time to the first token is the query round alone. What a load
costs is taken from pairs: a question about a document that has to be loaded, and at once another one, for which the
document lies in vLLM's own cache. Both are answered by the same process: processes of the very same engine differ by
more than a load costs. The two rounds that follow cost minutes on a slow machine and are therefore measured once.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.bench import long_doc_qa_client as client
from kvtier.bench.companion import SOCKET
from kvtier.bench.compare import memory
from kvtier.bench.compare.contenders import Contender
from kvtier.bench.compare.measures import Memory, Restart, Run, throughput
from kvtier.bench.long_doc_qa_work import Ask, Workload
from kvtier.bench.servers import VllmServer
from kvtier.errors import KVTierError

MODEL = "qwen"
INFLIGHT = 1
MIXED = (1, 1)
"""Documents asked again to documents that were never seen, in the mixed round."""
_MIXED_FIRST, _RESTART_FIRST, _FIRST_PAIR = 1, 2, 3
"""Questions that nobody has asked before."""
_PAIRS = 4
"""Of each document."""
_SETTLE_S = 3.0
_REQUEST_S = 300.0
_REASON_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Serving:
    """An arm that runs. ``beside``: its companion's process; ``folder``: where that listens; ``budget``: RAM, bytes."""

    one: Contender
    server: VllmServer
    beside: int | None
    folder: Path
    budget: int


def measured(args: argparse.Namespace, serving: Serving, last: bool) -> Run:
    """Pre-warm-up, warm-up (fills the caches), query (reads them); in the ``last`` round of the comparison more."""
    asker, words = client.connect(serving.server.base_url, MODEL, _REQUEST_S)
    work = Workload.of(args, words)
    fill = 0.0
    for asks in (work.pre_warm_up(), work.warm_up()):
        outcomes = _asked(asker, asks)
        for outcome in outcomes:
            if not outcome.successful:
                raise client.RequestError(f"a request before the query round failed: {outcome.error}")
        fill = throughput(outcomes)
    time.sleep(_SETTLE_S)
    before = _cpu_s()
    outcomes = _asked(asker, work.queries())
    run = Run(serving.one.name, outcomes, fill, _cpu_s() - before, _memory(serving))
    if serving.one.connector is not None:
        run = replace(run, pairs=_asked(asker, _paired(work)))
    if not last:
        return run
    run = replace(run, mixed=_asked(asker, replace(work, hit_miss=MIXED).queries(first=_MIXED_FIRST)))
    return replace(run, restart=_restarted(serving, work)) if serving.one.outlives else run


def _paired(work: Workload) -> list[Ask]:
    """A document's questions in twos; between them other documents, which push it out of vLLM's cache."""
    twice = replace(work, repeat_count=2, repeat_mode="interleave")
    return [ask for turn in range(_PAIRS) for ask in twice.queries(first=_FIRST_PAIR + 2 * turn)]


def _restarted(serving: Serving, work: Workload) -> Restart:
    """SIGTERM to all of the engine's processes, then a start. A failure is the arm's, and told. The questions are new
    ones: a question that was asked before would be in some caches and not in others."""
    try:
        serving.server.stop()
        begun = time.perf_counter()
        serving.server.start()
        ready = time.perf_counter() - begun
        asker, _ = client.connect(serving.server.base_url, MODEL, _REQUEST_S)
    except KVTierError as error:
        return Restart(error=first_cause(error))
    return Restart(ready, _asked(asker, work.queries(first=_RESTART_FIRST)))


def _asked(asker: client.Client, asks: Sequence[Ask]) -> list[client.Outcome]:
    return asker.run(asks, INFLIGHT, _nothing)


def _memory(serving: Serving) -> Memory | None:
    """None where it cannot be read."""
    roots = [one for one in (serving.server.pid, serving.beside) if one is not None]
    try:
        touched, untouched = memory.in_use(memory.family(roots))
        redis = serving.one.beside[:1] == ("redis-server",)
        return Memory(touched, untouched, serving.budget + (memory.redis_data(serving.folder / SOCKET) if redis else 0))
    except (OSError, ValueError):
        return None


def _cpu_s() -> float:
    """CPU seconds of the whole machine since its start, the kernel's work for disks and sockets included."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def first_cause(error: Exception) -> str:
    """The first of the causes that a server's log tells, or the beginning of the message."""
    lines = str(error).splitlines()
    causes = lines[lines.index("its first errors:") + 1 :][:1] if "its first errors:" in lines else lines[:1]
    return " ".join(causes)[:_REASON_CHARACTERS]


def _nothing() -> None:
    """Nobody watches."""
