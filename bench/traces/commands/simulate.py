"""``kvtier simulate FILE``: what caches of given sizes would have hit of recorded requests, by
policy and hints."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.bench.traces.belady import belady
from kvtier.bench.traces.commands import plot
from kvtier.bench.traces.formats import FORMS, read
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Cache, Result, oracle, simulate, unhinted, unique
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import progress, table

POLICIES = ("lru", "auto", "belady")
_TITLES = {"nvme": "NVMe", "redis": "Redis"}
_BAR = 30
_MOST_CHUNKS = 1 << 28


class Case(NamedTuple):
    """One row: sizes in chunks, and the result."""

    policy: str
    ram: int
    nvme: int
    redis: int
    result: Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "file",
        help="recorded requests; a folder is a recorder's, or has conversations of kv-cache-tester",
    )
    add("--format", choices=tuple(FORMS), help="the file's form; default: told from the file")
    add(
        "--ram",
        nargs="+",
        default=["1%", "2.5%", "5%", "10%", "20%"],
        metavar="SIZE",
        help="chunks in RAM, or a percentage of all chunks of the trace; several: one row each",
    )
    add("--nvme", default="0", metavar="SIZE", help="chunks in NVMe, likewise; 0: no such tier")
    add("--redis", default="0", metavar="SIZE", help="chunks in Redis, the lowest tier, likewise")
    add("--write", choices=("save", "evict"), default="evict", help="when NVMe is written")
    add("--policy", nargs="+", choices=POLICIES, default=["lru", "auto"], help="belady: RAM alone")
    add(
        "--hints",
        choices=("none", "recorded", "oracle"),
        default="none",
        help="which sessions say that they are over; oracle: each at its end",
    )
    add("--cover", type=_part, default=1.0, help="oracle: the part of the sessions that say so")
    add(
        "--wrong",
        type=_part,
        default=0.0,
        help="oracle: the part of the earlier requests that say so wrongly",
    )
    add(
        "--keep-partial",
        action="store_true",
        help="keep a prompt's last block although it is not full; kvtier does not",
    )
    add("--json", action="store_true", help="print a list of cases, in chunks")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the hits by RAM size and policy, beside the optimum (Belady)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for a file that is not a trace."""
    picture = None if arguments.plot is None else plot.HitPlot(arguments.plot)
    trace = read(arguments.file, arguments.format, arguments.keep_partial).requests
    every = unique(trace)
    if not every:
        raise ConfigError(
            f"{arguments.file}: no full block in {len(trace):,} requests, so there is "
            "nothing to keep"
        )
    cases = list(_cases(trace, every, arguments))
    if picture is not None:
        _draw(picture, cases, trace)
        picture.save(f"{Path(arguments.file).name}: {every:,} different chunks")
    if arguments.json:
        print(msgspec.json.encode([_document(case) for case in cases]).decode())
    else:
        print("\n".join(_screen(cases, trace, every)))
    return 0


def _cases(trace: Sequence[Request], every: int, arguments: argparse.Namespace) -> Iterator[Case]:
    if arguments.hints == "oracle":
        trace = oracle(trace, arguments.cover, arguments.wrong)
    elif arguments.hints == "none":
        trace = unhinted(trace)
    nvme, redis = _size(arguments.nvme, every), _size(arguments.redis, every)
    for policy in arguments.policy:
        for given in arguments.ram:
            slots = max(1, _size(given, every))
            if policy == "belady":
                yield Case(policy, slots, 0, 0, belady(trace, slots))
                continue
            cache = Cache(slots, nvme, policy, arguments.write == "evict", redis)
            tell = progress(f"{policy} {given}", len(trace))
            yield Case(policy, slots, nvme, redis, simulate(trace, cache, tell))


def _draw(picture: plot.HitPlot, cases: Sequence[Case], trace: Sequence[Request]) -> None:
    below = max(case.nvme + case.redis for case in cases)
    optimum = {} if below else {case.ram: case.result for case in cases if case.policy == "belady"}
    for case in cases:
        if case.policy != "belady":
            picture.add(case.policy, case.ram, case.result)
    for slots in sorted({case.ram for case in cases}):
        picture.add("belady", slots, optimum.get(slots) or belady(trace, slots + below))


def _screen(cases: Sequence[Case], trace: Sequence[Request], every: int) -> Iterator[str]:
    asked = sum(len(request.run) for request in trace)
    yield f"{len(trace):,} requests ask for {asked:,} chunks, {every:,} of them different"
    yield from _answers(trace)
    yield ""
    tiers = [name for name in ("nvme", "redis") if any(getattr(case, name) for case in cases)]
    heads = ["policy", "RAM", *(_TITLES[name] for name in tiers), "RAM hits"]
    heads += [f"{_TITLES[name]} hits" for name in tiers]
    heads += ["hits", *(f"{_TITLES[name]} writes (unread)" for name in tiers), ""]
    rows = [[*_cells(case, tiers)] for case in cases]
    yield from table(heads, rows, numbers=range(1, len(heads) - 1))
    refused = sum(case.result.refused for case in cases)
    if refused:
        yield f"{refused:,} chunks had no room beside the others of their prompt"


def _answers(trace: Sequence[Request]) -> Iterator[str]:
    """What the trace says of answers, if anything."""
    answers = [request.output for request in trace if request.output is not None]
    if answers:
        stops = Counter(request.stop for request in trace if request.stop)
        said = [f"{stop} {n / stops.total():.0%}".replace("%", " %") for stop, n in stops.items()]
        ended = f"; they ended by: {', '.join(sorted(said))}" if said else ""
        mean = sum(answers) / len(answers)
        yield f"{len(answers):,} answers have {mean:,.0f} tokens on average{ended}"


def _cells(case: Case, tiers: Sequence[str]) -> Iterator[str]:
    """One row of the table."""
    result = case.result
    below = {
        "nvme": (case.nvme, result.lower, result.writes, result.unread),
        "redis": (case.redis, result.redis, result.redis_writes, result.redis_unread),
    }
    yield "belady (RAM alone)" if case.policy == "belady" else case.policy
    yield f"{case.ram:,}"
    yield from (f"{below[name][0]:,}" if below[name][0] else "" for name in tiers)
    for hits in (result.ram, *(below[name][1] for name in tiers), result.hits):
        yield f"{result.percent(hits):.2f} %"
    for _, _, writes, unread in (below[name] for name in tiers):
        yield f"{writes:,} ({unread / writes:.0%})" if writes else ""
    yield "#" * round(_BAR * result.hits / max(1, result.asked))


def _document(case: Case) -> dict[str, object]:
    return {
        "ram_chunks": case.ram,
        "nvme_chunks": case.nvme,
        "redis_chunks": case.redis,
        "policy": case.policy,
        **case.result._asdict(),
    }


def _size(given: str, every: int) -> int:
    number, percent = given.removesuffix("%"), given.endswith("%")
    try:
        size = float(number) * every / 100 if percent else int(number)
    except ValueError:
        size = -1
    if not 0 <= size <= _MOST_CHUNKS:
        raise ConfigError(
            f"{given!r} is not a size: give chunks such as 5000, or a percentage such as 2.5%"
        )
    return int(size)


def _part(given: str) -> float:
    part = float(given)
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError("must lie between 0 and 1")
    return part
