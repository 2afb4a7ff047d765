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
from collections.abc import Callable, Mapping, Sequence
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
_HOURS, _SEED = 2.0, 0
_FLAGS = "--keep-partial"
_DIGITS = 2
_COUNTED = ("hits", "saved compute")


def parts(file: str, requests: int) -> list[Callable[[], list[Row]]]:
    """Each makes rows: together a row for each number of the tables, in per cent of the chunks or
    of the prefill, or in chunks. ``requests``: the first ones of each kind of generated
    traffic."""
    return [
        *(partial(_in_ram, file, words) for words in IN_RAM),
        *(partial(_in_both, file, words) for words in IN_BOTH),
        *(partial(_generated, kind, requests) for kind in KINDS),
    ]


def measured(file: str, requests: int, jobs: int = 1) -> list[Row]:
    """The rows of all :func:`parts`. ``jobs``: so many parts at a time, each in a process."""
    every = parts(file, requests)
    if jobs == 1:
        return [row for part in every for row in part()]
    with ProcessPoolExecutor(jobs) as pool:
        made = [pool.submit(part) for part in every]
        return [row for each in made for row in each.result()]


def _hits(name: str, result: Result) -> list[Row]:
    return [
        Row(f"{name}: hits", result.percent(result.hits), "%"),
        Row(f"{name}: saved compute", result.saved_percent, "%"),
    ]


def _in_ram(file: str, words: str) -> list[Row]:
    cases = _cases(file, f"{words} --ram {' '.join(SIZES)}")
    named = zip(SIZES, cases, strict=True)
    return [row for size, case in named for row in _hits(f"{words} --ram {size}", case.result)]


def _in_both(file: str, words: str) -> list[Row]:
    (case,) = _cases(file, f"{words} {BOTH}")
    result, name = case.result, f"{words} {BOTH}"
    return [
        Row(f"{name}: RAM hits", result.percent(result.ram), "%"),
        Row(f"{name}: NVMe hits", result.percent(result.lower), "%"),
        *_hits(name, result),
        Row(f"{name}: writes", result.writes, "chunks"),
        Row(
            f"{name}: writes never read",
            100 * result.unread / result.writes if result.writes else None,
            "%",
        ),
    ]


def _generated(kind: str, requests: int) -> list[Row]:
    trace, rows = traffic(_HOURS, _SEED, kind=kind)[:requests], list[Row]()
    every, compute = unique(trace), SavedCompute(BLOCK_TOKENS)
    for size in KIND_SIZES:
        for policy in KIND_POLICIES:
            cache = Cache(max(1, chunks_of(size, every)), policy=policy, compute=compute)
            rows += _hits(f"{kind}: {policy} --ram {size}", served(trace, cache))
    ram, nvme = (max(1, chunks_of(size, every)) for size in BOTH.split()[1::2])
    for policy in KIND_POLICIES_IN_BOTH:
        found = served(trace, Cache(ram, nvme, policy, compute=compute))
        name = f"{kind}: {policy} {BOTH}"
        rows += _hits(name, found)
        rows.append(Row(f"{name}: writes", found.writes, "chunks"))
    return rows


def _cases(file: str, words: str) -> list[Case]:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return simulate.cases(parser.parse_args([file, _FLAGS, *shlex.split(words)]))


def shown_in_ram(rows: Mapping[str, float | None]) -> list[list[str]]:
    """A table of hits and saved compute by the RAM's size. ``rows``: values by their names."""
    cells = [
        [
            f"`{words}`",
            *(_pair(rows, f"{words} --ram {size}") for size in SIZES),
        ]
        for words in IN_RAM
    ]
    regrets = [
        _regret(rows, [f"--policy {one} --ram {size}" for one in (*FIXED, "auto")])
        for size in SIZES
    ]
    return [
        ["hits / saved compute, %", *SIZES],
        *cells,
        ["best fixed", *(best for best, _ in regrets)],
        ["regret of `auto`, points", *(regret for _, regret in regrets)],
    ]


def _regret(rows: Mapping[str, float | None], names: Sequence[str]) -> tuple[str, str]:
    """Which fixed setting hits most, and by how many points of hits and of saved compute ``auto``
    is below the best of each. ``names``: of the settings' rows, ``auto``'s last."""
    hits, saved = ([rows[f"{name}: {what}"] or 0.0 for name in names] for what in _COUNTED)
    best = tuple(FIXED)[max(range(len(FIXED)), key=hits.__getitem__)]
    return f"`{best}`", f"{_text(max(hits) - hits[-1])} / {_text(max(saved) - saved[-1])}"


def shown_in_both(rows: Mapping[str, float | None]) -> list[list[str]]:
    cells = [
        [
            f"`{words}`",
            _text(rows[f"{words} {BOTH}: RAM hits"]),
            _text(rows[f"{words} {BOTH}: NVMe hits"]),
            _pair(rows, f"{words} {BOTH}"),
            f"{rows[f'{words} {BOTH}: writes']:,.0f}",
            f"{rows[f'{words} {BOTH}: writes never read'] or 0:.0f}",
        ]
        for words in IN_BOTH
    ]
    heads = ["RAM hits, %", "NVMe hits, %", "hits / saved compute, %", "writes", "never read, %"]
    return [[f"`{BOTH}`", *heads], *cells]


def shown_kinds(rows: Mapping[str, float | None]) -> list[list[str]]:
    cells = [
        [
            f"{kind}, {size}",
            *(_pair(rows, f"{kind}: {policy} --ram {size}") for policy in KIND_POLICIES),
            *_regret(rows, [f"{kind}: {policy} --ram {size}" for policy in KIND_POLICIES]),
        ]
        for kind in KINDS
        for size in KIND_SIZES
    ]
    heads = [*(f"`{policy}`" for policy in KIND_POLICIES), "best fixed", "regret of `auto`"]
    return [["traffic, RAM", *heads], *cells]


def shown_kinds_in_both(rows: Mapping[str, float | None]) -> list[list[str]]:
    names = [[f"{kind}: {policy} {BOTH}" for policy in KIND_POLICIES_IN_BOTH] for kind in KINDS]
    cells = [
        [
            kind,
            *(_pair(rows, name) for name in own),
            *(f"{rows[f'{name}: writes']:,.0f}" for name in own),
        ]
        for kind, own in zip(KINDS, names, strict=True)
    ]
    heads = [f"`{policy}`" for policy in KIND_POLICIES_IN_BOTH]
    return [[f"traffic, `{BOTH}`", *heads, *(f"{head}, writes" for head in heads)], *cells]


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """This page with the tables of these rows between its marks."""
    values = {row.name: row.value for row in rows}
    shown = (shown_in_ram, shown_in_both, shown_kinds, shown_kinds_in_both)
    made = "\n\n".join(table(each(values)) for each in shown)
    return replaced("bench/NOTES.md", page, "policies", made)


def _pair(rows: Mapping[str, float | None], name: str) -> str:
    return f"{_text(rows[f'{name}: hits'])} / {_text(rows[f'{name}: saved compute'])}"


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.{_DIGITS}f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--output", type=Path, default=Path("bench/results/policies.json"))
    parser.add_argument("--notes", type=Path, default=Path("bench/NOTES.md"))
    about = "of each kind of generated traffic (default: 4000)"
    parser.add_argument("--generated", type=int, default=4000, metavar="REQUESTS", help=about)
    about = "processes that measure (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=about)
    args = parser.parse_args(argv)
    rows = measured(args.trace, args.generated, args.jobs)
    print_rows(rows)
    requests = read(args.trace, partial=True).requests
    asked = sum(len(request.run) for request in requests)
    facts = {"requests": len(requests), "chunks": asked, "different": unique(requests)}
    write_results(args.output, "policies", rows, trace=facts)
    text = args.notes.read_text(encoding="utf-8")
    args.notes.write_text(with_tables(text, rows), encoding="utf-8")
    wrote([args.output, args.notes])
    return 0


if __name__ == "__main__":
    sys.exit(main())
