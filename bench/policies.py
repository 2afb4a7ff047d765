"""Hits and saved compute of each policy: NOTES' tables. Of a trace by size and hints,
and of generated traffic (:mod:`kvtier.bench.queue.traffic`) by its kind.

``python -m kvtier.bench.policies TRACE`` runs ``kvtier simulate`` on Mooncake's conversation trace
(``conversation_trace.jsonl`` of https://github.com/kvcache-ai/Mooncake) for every row, and writes
``bench/results/policies.json`` and the tables in ``bench/NOTES.md``. ``--jobs 2``
takes two cores.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from kvtier.bench.command import wrote
from kvtier.bench.flags import described
from kvtier.bench.queue.traffic import KINDS, traffic
from kvtier.bench.readme import replaced, table
from kvtier.bench.report import Row, print_rows, write_results
from kvtier.bench.traces.commands import simulate
from kvtier.bench.traces.commands.simulate import Case, chunks_of
from kvtier.bench.traces.formats import read
from kvtier.bench.traces.mooncake import BLOCK_TOKENS
from kvtier.bench.traces.simulate import FIXED, Cache, Result, unique
from kvtier.bench.traces.simulate import simulate as served
from kvtier.eviction.saved_compute import SavedCompute

SIZES = ("1%", "2.5%", "5%", "10%", "20%")
IN_RAM = (
    *(f"--policy {name}" for name in FIXED),
    "--policy auto",
    "--policy auto --hints oracle",
    "--policy auto --hints oracle --cover 0.5",
    "--policy auto --hints oracle --wrong 0.1",
    "--policy belady",
)
BOTH = "--ram 2.5% --nvme 20%"
IN_BOTH = (
    "--policy lru --write save",
    "--policy lru",
    "--policy auto",
    "--policy auto --hints oracle",
    "--policy auto --hints oracle --wrong 0.1",
)
"""Without ``--write`` NVMe is written when RAM drops a chunk."""
KIND_SIZES = ("2.5%", "5%")
KIND_POLICIES = (*FIXED, "auto")
KIND_POLICIES_IN_BOTH = ("lru", "auto")
_HOURS, _SEED, _REQUESTS = 2.0, 0, 4000
_FLAGS = "--keep-partial"


Found = dict[str, Result]
"""Results of simulations, by their words."""


def parts(file: str, requests: int) -> list[Callable[[], Found]]:
    """``requests``: the first ones of each kind of generated traffic."""
    return [
        *(partial(_in_ram, file, words) for words in IN_RAM),
        *(partial(_in_both, file, words) for words in IN_BOTH),
        *(partial(_generated, kind, requests) for kind in KINDS),
    ]


def measured(file: str, requests: int, jobs: int = 1) -> Found:
    """The results of all :func:`parts`. ``jobs``: so many parts at a time, each in a process."""
    with ProcessPoolExecutor(jobs) as pool:
        made = [pool.submit(part) for part in parts(file, requests)]
        return {name: result for each in made for name, result in each.result().items()}


def _in_ram(file: str, words: str) -> Found:
    cases = _cases(file, f"{words} --ram {' '.join(SIZES)}")
    named = zip(SIZES, cases, strict=True)
    return {f"{words} --ram {size}": case.result for size, case in named}


def _in_both(file: str, words: str) -> Found:
    (case,) = _cases(file, f"{words} {BOTH}")
    return {f"{words} {BOTH}": case.result}


def _generated(kind: str, requests: int) -> Found:
    trace, compute = traffic(_HOURS, _SEED, kind=kind)[:requests], SavedCompute(BLOCK_TOKENS)
    every = unique(trace)
    sizes = [(policy, f"--ram {size}") for size in KIND_SIZES for policy in KIND_POLICIES]
    sizes += [(policy, BOTH) for policy in KIND_POLICIES_IN_BOTH]
    made = {}
    for policy, words in sizes:
        ram, *lower = (max(1, chunks_of(size, every)) for size in words.split()[1::2])
        cache = Cache(ram, sum(lower), policy, compute=compute)
        made[f"{kind}: {policy} {words}"] = served(trace, cache)
    return made


def _cases(file: str, words: str) -> list[Case]:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return simulate.cases(parser.parse_args([file, _FLAGS, *shlex.split(words)]))


def shown_in_ram(found: Found) -> list[list[str]]:
    """A table of hits and saved compute by the RAM's size."""
    cells = [
        [
            f"`{words}`",
            *(_pair(found, f"{words} --ram {size}") for size in SIZES),
        ]
        for words in IN_RAM
    ]
    regrets = [
        _regret(found, [f"--policy {one} --ram {size}" for one in (*FIXED, "auto")])
        for size in SIZES
    ]
    return [
        ["hits / saved compute, %", *SIZES],
        *cells,
        ["best fixed", *(best for best, _ in regrets)],
        ["regret of `auto`, points", *(regret for _, regret in regrets)],
    ]


def _regret(found: Found, names: Sequence[str]) -> tuple[str, str]:
    """Which fixed setting hits most, and by how many points of hits and of saved compute ``auto``
    is below the best of each. ``names``: of the settings' rows, ``auto``'s last."""
    hits, saved = zip(*(_counted(found[name]) for name in names), strict=True)
    best = tuple(FIXED)[max(range(len(FIXED)), key=hits.__getitem__)]
    return f"`{best}`", f"{_text(max(hits) - hits[-1])} / {_text(max(saved) - saved[-1])}"


def shown_in_both(found: Found) -> list[list[str]]:
    cells = [
        [
            f"`{words}`",
            _text(one.percent(one.ram)),
            _text(one.percent(one.lower)),
            _pair(found, f"{words} {BOTH}"),
            f"{one.writes:,}",
            f"{100 * one.unread / max(1, one.writes):.0f}",
        ]
        for words in IN_BOTH
        for one in [found[f"{words} {BOTH}"]]
    ]
    heads = ["RAM hits, %", "NVMe hits, %", "hits / saved compute, %", "writes", "never read, %"]
    return [[f"`{BOTH}`", *heads], *cells]


def shown_kinds(found: Found) -> list[list[str]]:
    cells = [
        [
            f"{kind}, {size}",
            *(_pair(found, f"{kind}: {policy} --ram {size}") for policy in KIND_POLICIES),
            *_regret(found, [f"{kind}: {policy} --ram {size}" for policy in KIND_POLICIES]),
        ]
        for kind in KINDS
        for size in KIND_SIZES
    ]
    heads = [*(f"`{policy}`" for policy in KIND_POLICIES), "best fixed", "regret of `auto`"]
    return [["traffic, RAM", *heads], *cells]


def shown_kinds_in_both(found: Found) -> list[list[str]]:
    names = [[f"{kind}: {policy} {BOTH}" for policy in KIND_POLICIES_IN_BOTH] for kind in KINDS]
    cells = [
        [
            kind,
            *(_pair(found, name) for name in own),
            *(f"{found[name].writes:,}" for name in own),
        ]
        for kind, own in zip(KINDS, names, strict=True)
    ]
    heads = [f"`{policy}`" for policy in KIND_POLICIES_IN_BOTH]
    return [[f"traffic, `{BOTH}`", *heads, *(f"{head}, writes" for head in heads)], *cells]


def with_tables(page: str, found: Found) -> str:
    """This page with the tables of these results between its marks."""
    shown = (shown_in_ram, shown_in_both, shown_kinds, shown_kinds_in_both)
    made = "\n\n".join(table(each(found)) for each in shown)
    return replaced("bench/NOTES.md", page, "policies", made)


def _counted(result: Result) -> tuple[float, float]:
    """Per cent of the chunks that were hits, and of the compute that those saved."""
    return result.percent(result.hits), result.saved_percent


def _pair(found: Found, name: str) -> str:
    return " / ".join(map(_text, _counted(found[name])))


def _text(value: float) -> str:
    return f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--output", type=Path, default=Path("bench/results/policies.json"))
    parser.add_argument("--notes", type=Path, default=Path("bench/NOTES.md"))
    about = "processes that measure (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=about)
    args = parser.parse_args(argv)
    found = measured(args.trace, _REQUESTS, args.jobs)
    rows = [
        Row(f"{name}: {what}", value, "%")
        for name, result in found.items()
        for what, value in zip(("hits", "saved compute"), _counted(result), strict=True)
    ]
    print_rows(rows)
    requests = read(args.trace, partial=True).requests
    asked = sum(len(request.run) for request in requests)
    facts = {"requests": len(requests), "chunks": asked, "different": unique(requests)}
    write_results(args.output, "policies", rows, trace=facts)
    text = args.notes.read_text(encoding="utf-8")
    args.notes.write_text(with_tables(text, found), encoding="utf-8")
    wrote([args.output, args.notes])
    return 0


if __name__ == "__main__":
    sys.exit(main())
