"""The rounds of one arm: fill, query and pairs. In the comparison's last round there are also a
mixed one, a second engine and a restart.

Requests are asked one at a time. Only the query round counts for the time to the first token. What
a load costs is taken from pairs: a question about a document that has to be loaded, and at once
another one, for which the document is in vLLM's own cache. The same process answers both, because
processes of the very same engine differ by more than a load costs, in time and in CPU time. After
each question the engine has a moment to end what it began, so that this counts for that question.
What follows the pairs takes minutes on a slow machine and is measured once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.bench.compare import calls, memory
from kvtier.bench.compare.measures import Again, Effort, Memory, Run, efforts, throughput
from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.processes.companion import SOCKET
from kvtier.bench.processes.servers import VllmServer
from kvtier.bench.requests import client
from kvtier.bench.requests.prompts import Ask
from kvtier.core.errors import KVTierError

MODEL = "qwen"
INFLIGHT = 1
MIXED = (1, 1)
"""Documents asked again, and documents that were never seen, in the mixed round."""
_MIXED_FIRST, _RESTART_FIRST, _SECOND_FIRST, _FIRST_PAIR = 1, 2, 3, 4
"""The first of questions that were not asked before."""
_PAIRS = 12
"""For each document. What a load takes of a CPU is little compared with the difference between two
answers."""
_SETTLE_S, _REST_S = 3.0, 0.05
"""Seconds after the fill, and after each question of the pairs."""
_REQUEST_S = 300.0
_REASON_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Serving:
    """An arm that runs. ``second``: another engine of it, not started. ``beside``: its companion's
    process. ``folder``: where that listens. ``budget``: RAM in bytes. ``calls``: the file of the
    engine's calls of its connector."""

    one: Contender
    server: VllmServer
    second: VllmServer
    beside: int | None
    folder: Path
    budget: int
    calls: Path

    @property
    def roots(self) -> list[int]:
        """The engine's first process and the companion's."""
        return [one for one in (self.server.pid, self.beside) if one is not None]


def measured(args: argparse.Namespace, serving: Serving, last: bool) -> Run:
    """Pre-warm-up, warm-up (fills the caches), query (reads them) and pairs. The comparison's
    ``last`` round has more."""
    asker, words = client.connect(serving.server.base_url, MODEL, _REQUEST_S)
    work = Workload.of(args, words)
    client.all_succeeded(serving.one.name, _asked(asker, work.pre_warm_up()))
    filled, fill_efforts = _watched(asker, work.warm_up(), serving, _SETTLE_S)
    fill = throughput(client.all_succeeded(serving.one.name, filled))
    run = Run(serving.one.name, _asked(asker, work.queries()), fill)
    run = replace(run, memory=_memory(serving))
    if serving.one.connector is not None:
        pairs, pair_efforts = _watched(asker, _paired(work), serving, 0.0, _REST_S)
        tokens = sum(one.prompt_tokens for one in filled)
        run = replace(
            run,
            fill_tokens=tokens,
            fill_efforts=fill_efforts,
            pairs=pairs,
            pair_efforts=pair_efforts,
        )
    if not last:
        return run
    mixed = replace(work, hit_miss_ratio=MIXED).queries(first=_MIXED_FIRST)
    run = replace(run, mixed=_asked(asker, mixed))
    if serving.one.shares:
        run = replace(run, second=_second(serving, work))
    return replace(run, restart=_restarted(serving, work)) if serving.one.outlives else run


def _watched(
    asker: client.Client,
    asks: Sequence[Ask],
    serving: Serving,
    settle_s: float,
    rest_s: float = 0.0,
) -> tuple[list[client.Outcome], list[Effort]]:
    """What the answers took, too. ``rest_s``: the pause before the next is asked. ``settle_s``: the
    pause after the last."""
    processes = memory.family(serving.roots)

    def note() -> tuple[float, float | None]:
        return time.perf_counter(), _cpu_s(processes)

    def answered() -> None:
        time.sleep(rest_s)
        notes.append(note())

    notes = [note()]
    outcomes = asker.run(asks, INFLIGHT, answered)
    time.sleep(settle_s)
    return outcomes, efforts(notes, calls.read(serving.calls))


def _paired(work: Workload) -> list[Ask]:
    """Two questions about a document at a time. Other documents are between them, and push it out
    of vLLM's cache."""
    twice = replace(work, repeat_count=2, repeat_mode="interleave")
    return [ask for turn in range(_PAIRS) for ask in twice.queries(first=_FIRST_PAIR + 2 * turn)]


def _second(serving: Serving, work: Workload) -> Again:
    """Another engine, while the first has nothing to do. It is stopped at the end."""
    try:
        return _again(serving.second, work, _SECOND_FIRST)
    finally:
        serving.second.stop()


def _restarted(serving: Serving, work: Workload) -> Again:
    """SIGTERM to all of the engine's processes, then a start."""
    serving.server.stop()
    return _again(serving.server, work, _RESTART_FIRST)


def _again(server: VllmServer, work: Workload, first: int) -> Again:
    """A failure goes into the arm's results. The questions are new, because questions that were
    asked before would be in some caches and not in others."""
    try:
        begun = time.perf_counter()
        server.start()
        ready = time.perf_counter() - begun
        asker, _ = client.connect(server.base_url, MODEL, _REQUEST_S)
    except KVTierError as error:
        return Again(error=first_cause(error))
    return Again(ready, _asked(asker, work.queries(first=first)))


def _asked(asker: client.Client, asks: Sequence[Ask]) -> list[client.Outcome]:
    return asker.run(asks, INFLIGHT, _nothing)


def _memory(serving: Serving) -> Memory | None:
    """None where it cannot be read."""
    try:
        touched, untouched = memory.in_use(memory.family(serving.roots))
        redis = serving.one.beside[:1] == ("redis-server",)
        return Memory(
            touched,
            untouched,
            serving.budget + (memory.redis_data(serving.folder / SOCKET) if redis else 0),
        )
    except (OSError, ValueError):
        return None


def _cpu_s(processes: Iterable[int]) -> float | None:
    """None when one has ended."""
    try:
        return memory.cpu_seconds(processes)
    except OSError:
        return None


def first_cause(error: Exception) -> str:
    """The first of the causes that a server's log tells, or the beginning of the message."""
    lines = str(error).splitlines()
    causes = (
        lines[lines.index("its first errors:") + 1 :][:1]
        if "its first errors:" in lines
        else lines[:1]
    )
    return " ".join(causes)[:_REASON_CHARACTERS]


def _nothing() -> None:
    """There is no progress bar."""
