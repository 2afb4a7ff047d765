"""Loads in parts on a real engine: ``python -m kvtier.bench.compare.in_parts``.

Engines that are up at the same time are asked for the same documents in turn. One that has kvtier
loads them in parts, and with that kept out, when RAM has all of a hit: in turns, in the same
process. Then each document is asked for again, which vLLM's own cache answers: the difference is
the load's *cost*. A load of which RAM had half does not count.

- *Load cost*, of two sizes of documents: from NVMe, beside vLLM's own tiering connector over the
  same disk with the same RAM.
- *Eight times RAM*: a document of eight times the RAM tier from NVMe, beside direct reads of as
  many bytes from a file on the same disk into the same memory, in turns. Then two such documents at
  the same time. The first rounds, which use every block of the engine once, do not count.
- *Beside another request* that decodes: what the load adds to its longest gap, and to all of them.
- *RAM*: what RAM has comes whole, beside vLLM's own offloading to RAM.

The model has as much KV a token as a large one (``heavy`` of :mod:`kvtier.bench.model`), and little
to compute. A GPU computes it sooner than a disk is read, so kvtier loads every hit there. The peer
copies by its own kernels there, and by this benchmark's on a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.bench.command import terminable
from kvtier.bench.compare.in_parts.engine import (
    BLOCK,
    SWITCH,
    Answer,
    Document,
    EngineProcess,
    Settings,
)
from kvtier.bench.compare.peers.contenders import CONTENDERS, in_tree, rendered
from kvtier.bench.flags import described
from kvtier.bench.micro.nvme import gigabytes_per_second, raw_disk
from kvtier.bench.model import kv_token_bytes, make_model, read_config
from kvtier.bench.processes.engine import cpu_env, mode_told, modes_told, on_cpu, transfer
from kvtier.bench.report import Row, median_row, print_rows, write_results
from kvtier.tiers.nvme.disks import disk_threads, probe_disk

IN_PARTS, WHOLE = "in parts", "whole"
RAM = "RAM"
VLLM, VLLM_RAM = "vLLM's disk tier", "vLLM's RAM"
_PLACES = {"NVMe": "nvme", RAM: "ram"}
_PEERS = {"NVMe": VLLM, RAM: VLLM_RAM}
_AS_GPU = Path(__file__).resolve().parents[3] / "tests" / "cpu_as_gpu"
_DOCUMENTS = 3
_RAM_DOCUMENTS, _TIMES = 2.25, 8
"""RAM holds so many of the longest documents, or this part of one."""
_MOST_FILLS = 4
_WARM_ROUNDS = 2
"""Of both documents: more blocks than the engine has."""


@dataclass(slots=True)
class Told:
    """Answers by engine, way and size of document."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    skipped: int = 0
    """Loads that did not count, because RAM had half of it, or not all was found."""

    def add(self, name: str, answer: Answer, tokens: int, place: str | None) -> None:
        is_whole = min(answer.cached) >= tokens
        chunks = sum(answer.places.values())
        if is_whole and (place is None or 2 * answer.places.get(place, 0) > chunks):
            self.answers.setdefault(name, []).append(answer)
        else:
            self.skipped += 1
            print(f"does not count: {name}: {answer}")


class Lab:
    """The engines of one run. They end with ``stack``."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._arguments, self._stack = arguments, stack
        self.model = make_model(Path(arguments.models) / "heavy", "heavy")
        self.token_bytes = kv_token_bytes(read_config(self.model), 2)
        self.folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=Path(arguments.disk).resolve()))
        )
        self._signs = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        self.logs: list[Path] = []

    def ram(self, tokens: float) -> int:
        """Bytes of so many tokens, in whole chunks."""
        return int(tokens // BLOCK) * BLOCK * self.token_bytes

    def engine(
        self, name: str, longest: int, transfer: Mapping[str, Any], tier: Mapping[str, str]
    ) -> EngineProcess:
        """Start one. ``longest``: tokens of a document; its own cache holds two and a half."""
        blocks = 5 * longest // BLOCK // 2 + 64
        log = self.folder / f"{name}.log"
        cache_bytes = blocks * BLOCK * self.token_bytes
        environment = cpu_env(cache_bytes // 2**30 + 1) | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "KVTIER_CHUNK_TOKENS": str(BLOCK),
            "KVTIER_ADMIN": "off",
            "KVTIER_POLICY": "lru",  # of documents asked in turn RAM has none
        }
        if on_cpu():
            path = [str(_AS_GPU), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"CPU_AS_GPU_ASYNC": "1", "PYTHONPATH": ":".join(path)}
        steps = min(longest, self._arguments.step_tokens)
        settings = Settings(str(self.model), longest, blocks, cache_bytes, steps, transfer)
        engine = EngineProcess(settings, environment | dict(tier), log, self._signs)
        self._stack.callback(engine.stop)
        self.logs.append(log)
        return engine

    def ours(self, name: str, longest: int, tier: Mapping[str, str]) -> EngineProcess:
        ours = transfer(load_every_hit=not on_cpu()) | {"kv_connector_module_path": SWITCH}
        return self.engine(name, longest, ours, tier)

    def nvme(self, name: str, tokens: float) -> dict[str, str]:
        tier = {"KVTIER_NVME_PATH": str(self.folder / name), "KVTIER_NVME_BYTES": "6GiB"}
        return tier | {"KVTIER_RAM_BYTES": str(self.ram(tokens))}

    def vllm(self, arm: str, longest: int, tokens: float) -> EngineProcess:
        ram, connector = str(self.ram(tokens)), CONTENDERS[arm].connector
        assert connector is not None, arm
        names = {"ram_few_bytes": ram, "ram_all_bytes": ram, "nvme_path": str(self.folder / arm)}
        found = rendered(connector if on_cpu() else in_tree(connector), names)
        return self.engine(arm, longest, {"kv_role": "kv_both"} | found, {})


# ---- load cost -----------------------------------------------------------------------------------


def from_nvme(lab: Lab, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Beside vLLM's own tier, and then what a decoding request feels."""
    longest = max(sizes)
    ram = _RAM_DOCUMENTS * longest
    engines = {
        "NVMe": lab.ours("nvme", longest, lab.nvme("nvme", ram)),
        VLLM: lab.vllm("vllm-offloading-disk", longest, ram),
    }
    return load_costs(engines, sizes, rounds) + gaps(engines, sizes, rounds)


def from_ram(lab: Lab, sizes: Sequence[int], rounds: int) -> list[Row]:
    """All documents in RAM, beside vLLM's own, and then beside a decoding request."""
    longest = max(sizes)
    tokens = _DOCUMENTS * sum(sizes) + _RAM_DOCUMENTS * longest
    tier = {"KVTIER_RAM_BYTES": str(lab.ram(tokens))}
    engines = {
        RAM: lab.ours("ram", longest, tier),
        VLLM_RAM: lab.vllm("vllm-offloading-ram", longest, tokens),
    }
    return load_costs(engines, sizes, rounds) + gaps(engines, sizes, rounds)


def load_costs(
    engines: Mapping[str, EngineProcess], sizes: Sequence[int], rounds: int
) -> list[Row]:
    documents, told = _documents(sizes), Told()
    for name, engine in engines.items():
        engine.hear()
        _filled(name, engine, documents)
    for round_ in range(rounds):
        for at, document in enumerate(documents):
            in_parts = (round_ + at // len(sizes)) % 2 == 0
            way = IN_PARTS if in_parts else WHOLE
            for name, engine in engines.items():
                answer = engine.ask([document], in_parts=in_parts)
                label, place = f"{_label(name, way)}, {document.tokens:,}", _PLACES.get(name)
                told.add(label, answer, document.tokens, place)
    places = [name for name in engines if name in _PLACES]
    return [row for tokens in sizes for row in cost_rows(told, tokens, places)]


def _label(name: str, way: str) -> str:
    """Of what an engine answered. A peer has one way, and what RAM has comes whole."""
    return f"{name}, {way if name != RAM else WHOLE}" if name in _PLACES else name


def _documents(sizes: Sequence[int]) -> list[Document]:
    return [
        Document(number * len(sizes) + row, tokens)
        for number in range(_DOCUMENTS)
        for row, tokens in enumerate(sizes)
    ]


def _filled(name: str, engine: EngineProcess, documents: Sequence[Document]) -> None:
    seconds = statistics.median(engine.fill(documents))
    print(f"{name}: {len(documents)} documents, {seconds:.2f} s each", flush=True)


def _whole(engine: EngineProcess, document: Document) -> None:
    """Ask until the tier has all of it. RAM has slots for two steps here, and those of steps that
    are under way are taken: some saves of a first pass are refused."""
    for _ in range(_MOST_FILLS):
        if min(engine.ask([document]).cached) >= document.tokens:
            return
    raise RuntimeError(f"{document} is not whole after it was asked for {_MOST_FILLS} times")


def cost_rows(told: Told, tokens: int, places: Sequence[str]) -> list[Row]:
    """A row for each place and way. Ratios: to the same load without parts, and to vLLM's own tier
    of the same kind."""
    costs = {name: [1e3 * one.cost for one in given] for name, given in told.answers.items()}
    middle = {name: statistics.median(given) for name, given in costs.items()}
    rows = []
    for place in places:
        whole, parts = (f"{place}, {way}, {tokens:,}" for way in (WHOLE, IN_PARTS))
        head = f"{tokens:,} tokens from {place}: load cost"
        peer = f"{_PEERS.get(place)}, {tokens:,}"
        against = middle.get(peer)
        if whole in costs:
            rows.append(_cost(f"{head}, {WHOLE}", costs[whole], against))
        if parts in costs:
            rows.append(_cost(f"{head}, {IN_PARTS}", costs[parts], against))
            if whole in costs:
                rows.append(
                    _cost(f"{head}, {IN_PARTS} beside {WHOLE}", costs[parts], middle[whole])
                )
            begun = statistics.fmean(one.begun for one in told.answers[parts])
            rows.append(Row(f"{tokens:,} tokens from {place}: loads that began early", begun, ""))
        if against is not None:
            name = f"{tokens:,} tokens from {_PEERS[place]}: load cost"
            rows.append(_cost(name, costs[peer], None))
    return rows


def _cost(name: str, costs: Sequence[float], against: float | None) -> Row:
    ratio = statistics.median(costs) / against if against and against > 0 else None
    return median_row(name, costs, "ms", against, ratio)


# ---- beside another request ----------------------------------------------------------------------


def gaps(engines: Mapping[str, EngineProcess], sizes: Sequence[int], rounds: int) -> list[Row]:
    told, longest = Told(), max(sizes)
    documents = [one for one in _documents(sizes) if one.tokens == longest]
    for round_ in range(rounds):
        for at, document in enumerate(documents):
            in_parts = (round_ + at) % 2 == 0
            for name, engine in engines.items():
                answer = engine.ask([document], in_parts=in_parts, beside=True)
                label = _label(name, IN_PARTS if in_parts else WHOLE)
                told.add(label, answer, longest, _PLACES.get(name))
    return [row for name in engines if name in _PLACES for row in gap_rows(told, name)]


def gap_rows(told: Told, place: str) -> list[Row]:
    ways = [_PEERS[place], f"{place}, {WHOLE}", f"{place}, {IN_PARTS}"]
    rows = []
    for what, value in _FELT.items():
        middle = None
        for way in ways:
            found = [1e3 * value(one) for one in told.answers.get(way, [])]
            if found:
                rows.append(_cost(f"beside a decoding request, {way}: {what}", found, middle))
                middle = statistics.median(found)
    begun = [one.begun for one in told.answers.get(ways[-1], [])]
    if begun:
        name = f"beside a decoding request, {place}: loads that began early"
        rows.append(Row(name, statistics.fmean(begun), ""))
    return rows


_FELT: dict[str, Callable[[Answer], float]] = {
    "its longest gap": lambda one: one.longest,
    "its time lost to the load": lambda one: one.lost - one.warm_lost,
    "load cost": lambda one: one.cost,
}


# ---- longer than RAM -----------------------------------------------------------------------------


def longer_than_ram(lab: Lab, tokens: int, rounds: int) -> list[Row]:
    engine = lab.ours("eighth", tokens, lab.nvme("eighth", tokens / _TIMES))
    documents = [Document(number, tokens) for number in range(2)]
    engine.hear()
    _filled("an eighth in RAM", engine, documents)
    for document in documents:
        _whole(engine, document)
    for document in documents * _WARM_ROUNDS:
        engine.ask([document])
    raw_s, told = [], Told()
    with raw_read(lab, engine, tokens) as raw:
        for _ in range(rounds):
            for document in documents:
                raw_s.append(raw())
                told.add(IN_PARTS, engine.ask([document]), 0, None)
        both = [engine.ask(documents) for _ in range(rounds)]
    alone = told.answers[IN_PARTS]
    name = f"{tokens:,} tokens from NVMe, {_TIMES} times RAM"
    raw_ms, costs = [1e3 * one for one in raw_s], [1e3 * one.cost for one in alone]
    whole = [min(one.cached) / tokens for one in alone]
    pair = [one / tokens for answer in both for one in answer.cached]
    return [
        median_row(f"{name}: direct reads of as many bytes", raw_ms, "ms"),
        _cost(f"{name}: load cost", costs, statistics.median(raw_ms)),
        _part(f"{name}: part that was found", whole),
        _part(f"two at the same time, {name}: part of each that was found", pair),
        median_row(
            f"two at the same time, {name}: load cost", [1e3 * one.cost for one in both], "ms"
        ),
    ]


def _part(name: str, found: Sequence[float]) -> Row:
    return median_row(name, found, "", 1.0, statistics.median(found))


@contextmanager
def raw_read(lab: Lab, engine: EngineProcess, tokens: int) -> Iterator[Callable[[], float]]:
    """Seconds that direct reads of these tokens' bytes take, in chunks, by as many threads as the
    tier has, into the slots of an engine that has nothing to do. The slots have their own bytes
    again afterwards. A disk is up to a tenth slower or quicker with other memory of the same kind
    (``bench/NOTES.md``)."""
    count = tokens // BLOCK
    threads = disk_threads(probe_disk(str(lab.folder)), len(os.sched_getaffinity(0)))
    with closing(engine.pool()) as pool:
        slots = [pool.view(slot) for slot in range(pool.slots)]
        with raw_disk(lab.folder / "raw", pool.slot_bytes, count) as (write, read):
            gigabytes_per_second(write, count, slots, threads)

            def seconds() -> float:
                kept = bytes(pool.buffer)
                try:
                    speed = gigabytes_per_second(read, count, slots, threads)
                finally:
                    pool.buffer[:] = kept
                return count * pool.slot_bytes / 1e9 / speed

            yield seconds


PARTS: dict[str, Callable[[Lab, argparse.Namespace], list[Row]]] = {
    "ram": lambda lab, given: from_ram(lab, given.tokens, given.rounds),
    "nvme": lambda lab, given: from_nvme(lab, given.tokens, given.rounds),
    "long": lambda lab, given: longer_than_ram(lab, given.long, given.rounds),
}


def run(arguments: argparse.Namespace) -> int:
    rows, modes = list[Row](), list[str | None]()
    with terminable():
        for name, part in PARTS.items():
            if name in arguments.part:
                with ExitStack() as stack:
                    lab = Lab(arguments, stack)
                    rows += part(lab, arguments)
                    modes += [mode_told(log) for log in lab.logs]
                engines = modes_told(modes)
                write_results(arguments.output, "in_parts", rows, engines=engines)
    print_rows(rows)
    return 0


def main() -> int:
    parser = described(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=6, help="times that every document is asked for")
    add("--tokens", type=int, nargs="+", default=[512, 1024], help="sizes of documents")
    add("--long", type=int, default=4096, help="tokens of a document of eight times RAM")
    add("--step-tokens", type=int, default=256, help="vLLM's max_num_batched_tokens")
    add("--part", choices=PARTS, nargs="+", default=list(PARTS), help="only these (default: all)")
    add("--models", default="build/models")
    add("--disk", default="build", help="folder on the disk of the NVMe tier")
    add("--output", default="bench/results/in_parts.json")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
