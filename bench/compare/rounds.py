"""One arm's processes and phases: fill, query and pairs. In the last round there are also a
second engine and a restart, which take minutes on a slow machine.

Requests are asked one at a time. Only the query round counts for the time to the first token. What
a load costs is taken from pairs: a question about a document that has to be loaded, and at once
another one, for which the document is in vLLM's own cache. The same process answers both, because
processes of the very same engine differ by more than a load costs, in time and in CPU time. After
each question the engine has a moment to end what it began, so that this counts for that question.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvtier.bench.command import emptied
from kvtier.bench.compare import calls
from kvtier.bench.compare.peers.contenders import Contender, names, rendered
from kvtier.bench.compare.result import Again, Effort, Run, efforts
from kvtier.bench.long_doc_qa.arms import Arm, Sizes, Workload, filled, server_args
from kvtier.bench.model import kv_token_bytes, read_config
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.engine import Geometry, connector_args, shared_args
from kvtier.bench.processes.servers import VllmServer, free_port, running
from kvtier.bench.requests import client
from kvtier.bench.requests.client import Ask
from kvtier.core.errors import KVTierError

DTYPE, _DTYPE_BYTES = "bfloat16", 2
BLOCK_TOKENS, CHUNK_TOKENS = 128, 256
_START_S = 300.0


@contextmanager
def serving(one: Contender, model: Path, sizes: Sizes, place: Path) -> Iterator[Serving]:
    """An arm that runs until the end of the block. ``place``: its folder, which is emptied."""
    place = emptied(place.resolve())
    (place / "nvme").mkdir()
    with run_folder() as run, ExitStack() as ends:
        ends.callback(shutil.rmtree, place / "nvme", ignore_errors=True)
        values, aside = names(sizes, place, run, free_port()), None
        if one.yaml is not None:  # JSON is YAML
            (place / "lmcache.yaml").write_text(json.dumps(rendered(one.yaml, values)))
        if one.beside:
            command = [word.format_map(values) for word in one.beside]
            env, ready = filled(one.beside_env, values), partial(listens, run / SOCKET)
            aside = ends.enter_context(companion(command, env, ready, place / "beside.log"))
        first, second = (server(one, model, sizes, values, name) for name in ("server", "second"))
        ends.enter_context(first)
        yield Serving(one, first, second, aside, _calls(place, "server"))


def server(
    one: Contender, model: Path, sizes: Sizes, values: Mapping[str, str], name: str
) -> VllmServer:
    """Not started. ``name``: that of its log, and of the file of its calls."""
    arm = Arm(one.name, one.about, keeps_all_on_gpu=one.keeps_all_on_gpu)
    command = [*shared_args(model.name, DTYPE, BLOCK_TOKENS), "--enforce-eager"]
    command += server_args(arm, sizes)
    env, place = filled(one.env, values), Path(values["place"])
    if one.connector is not None:
        connector = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        connector |= rendered(one.connector, values)
        env[calls.CONNECTOR] = connector.get("kv_connector_module_path", "")
        env[calls.CALLS] = str(_calls(place, name))
        connector["kv_connector_module_path"] = calls.MODULE
        command += connector_args(connector)
    env["VLLM_CPU_KVCACHE_SPACE"] = str(sizes.gpu_gib(arm))
    # with a connector vLLM reserves other cores than without
    env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    return VllmServer(str(model), command, env, place / f"{name}.log", _START_S, one.interpreter)


def sizes_of(work: Workload, model: Path) -> Sizes:
    return Sizes(work, Geometry(BLOCK_TOKENS, CHUNK_TOKENS, token_bytes_of(model)))


def token_bytes_of(model: Path) -> int:
    return kv_token_bytes(read_config(str(model)), _DTYPE_BYTES)


def _calls(place: Path, name: str) -> Path:
    return place / f"{name}-calls.jsonl"


MODEL = "qwen"
_RESTART_FIRST, _SECOND_FIRST, _FIRST_PAIR = 2, 3, 4
"""The first of questions that were not asked before."""
_PAIRS = 12
"""For each document. What a load takes of a CPU is little compared with the difference between two
answers."""
_SETTLE_S, _REST_S = 3.0, 0.05
"""After the fill, and after each question of the pairs."""
_REQUEST_S = 300.0
_REASON_CHARACTERS = 400
_ALL_THREADS = 2
"""With a process's number: Linux's clock of its CPU time (``clock_getcpuclockid``,
CPUCLOCK_SCHED)."""


@dataclass(frozen=True, slots=True)
class Serving:
    """An arm that runs. ``second``: another engine of it, not started. ``beside``: its companion's
    process. ``calls``: the file of the engine's calls of its connector."""

    one: Contender
    server: VllmServer
    second: VllmServer
    beside: int | None
    calls: Path


def measured(args: argparse.Namespace, serving: Serving, last: bool) -> Run:
    """``last``: with a second engine and a restart."""
    asker, words = client.connect(serving.server.base_url, MODEL, _REQUEST_S)
    work, one = work_of(args, words), serving.one
    client.all_succeeded(one.name, _asked(asker, work.pre_warm_up()))
    filled, fill_efforts = _watched(asker, work.warm_up(), serving, _SETTLE_S)
    client.all_succeeded(one.name, filled)
    tokens = sum(each.prompt_tokens for each in filled)
    fill = tokens / max(each.request_end for each in filled)
    run = Run(one.name, _asked(asker, work.queries()), fill)
    if one.connector is not None:
        pairs, pair_efforts = _watched(asker, _paired(work), serving, 0.0, _REST_S)
        run = replace(run, fill_tokens=tokens, fill_efforts=fill_efforts)
        run = replace(run, pairs=pairs, pair_efforts=pair_efforts)
    if last and one.shares:
        try:
            run = replace(run, second=_again(serving.second, work, _SECOND_FIRST))
        finally:
            serving.second.stop()
    if last and one.outlives:
        serving.server.stop()
        run = replace(run, restart=_again(serving.server, work, _RESTART_FIRST))
    return run


def work_of(args: argparse.Namespace, words: Sequence[int | str]) -> Workload:
    """Every document once, one request at a time."""
    shape = (args.num_documents, args.document_length, args.question_length, args.output_len)
    return Workload(words, *shape, repeat_count=1, max_inflight_requests=1)


def _watched(
    asker: client.Client,
    asks: Sequence[Ask],
    serving: Serving,
    settle_s: float,
    rest_s: float = 0.0,
) -> tuple[list[client.Outcome], list[Effort]]:
    """The answers, and what they took. ``rest_s``: the pause before the next is asked.
    ``settle_s``: the pause after the last."""
    roots = [one for one in (serving.server.pid, serving.beside) if one is not None]
    processes = family(roots)

    def note() -> tuple[float, float | None]:
        return time.perf_counter(), cpu_seconds(processes)

    def answered() -> None:
        time.sleep(rest_s)
        notes.append(note())

    notes = [note()]
    outcomes = asker.run(asks, 1, answered)
    time.sleep(settle_s)
    return outcomes, efforts(notes, calls.read(serving.calls))


def _paired(work: Workload) -> list[Ask]:
    """Two questions about a document at a time. Other documents are between them, and push it out
    of vLLM's cache."""
    twice = replace(work, repeat_count=2, repeat_mode="interleave")
    return [ask for turn in range(_PAIRS) for ask in twice.queries(first=_FIRST_PAIR + 2 * turn)]


def _again(server: VllmServer, work: Workload, first: int) -> Again:
    """A failure goes into the arm's results. The questions are new, because questions that were
    asked before would be in some caches and not in others."""
    try:
        server.start()
        asker, _ = client.connect(server.base_url, MODEL, _REQUEST_S)
    except KVTierError as error:
        return Again(error=first_cause(error))
    return Again(_asked(asker, work.queries(first=first)))


def _asked(asker: client.Client, asks: Sequence[Ask]) -> list[client.Outcome]:
    return asker.run(asks, 1, lambda: None)


def first_cause(error: Exception) -> str:
    """The first of the causes that a server's log tells, or the beginning of the message."""
    lines = str(error).splitlines()
    mark = "its first errors:"
    causes = lines[lines.index(mark) + 1 :][:1] if mark in lines else lines[:1]
    return " ".join(causes)[:_REASON_CHARACTERS]


def family(roots: Iterable[int]) -> set[int]:
    children = defaultdict(list)
    for number, _, parent, _ in running():
        children[parent].append(number)
    found, todo = set(), list(roots)
    while todo:
        one = todo.pop()
        found.add(one)
        todo += children[one]
    return found


def cpu_seconds(processes: Iterable[int]) -> float | None:
    """Of these processes since their starts, to the nanosecond, threads that have ended included.
    None when a process has ended."""
    try:
        return sum(time.clock_gettime(~one << 3 | _ALL_THREADS) for one in processes)
    except OSError:
        return None
