"""``kvtier simulate FILE``: what caches of given sizes would have hit of recorded requests, by
policy and hints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvtier.core.errors import ConfigError
from kvtier.core.terminal import progress, table
from kvtier.traces.belady import belady
from kvtier.traces.mooncake import Request, lines_of, read
from kvtier.traces.simulate import (
    Cache,
    Hinted,
    Result,
    oracle,
    recorded,
    simulate,
    unhinted,
    unique,
)

POLICIES = ("lru", "auto", "belady")
_BAR = 30
_MOST_CHUNKS = 1 << 28


class Case(NamedTuple):
    """One row: sizes in chunks, and the result."""

    policy: str
    ram: int
    nvme: int
    result: Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a trace in Mooncake's form, or the folder of a recorder")
    parser.add_argument(
        "--ram",
        nargs="+",
        default=["1%", "2.5%", "5%", "10%", "20%"],
        metavar="SIZE",
        help="chunks in RAM, or a percentage of all chunks of the trace; several: one row each",
    )
    parser.add_argument(
        "--nvme", default="0", metavar="SIZE", help="chunks in NVMe, likewise; 0: no such tier"
    )
    parser.add_argument(
        "--write", choices=("save", "evict"), default="evict", help="when NVMe is written"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=POLICIES, default=["lru", "auto"], help="belady: RAM alone"
    )
    parser.add_argument(
        "--hints",
        choices=("none", "recorded", "oracle"),
        default="none",
        help="which sessions say that they are over; oracle: each at its end",
    )
    parser.add_argument(
        "--cover", type=_part, default=1.0, help="oracle: the part of the sessions that say so"
    )
    parser.add_argument(
        "--wrong",
        type=_part,
        default=0.0,
        help="oracle: the part of the earlier requests that say so wrongly",
    )
    parser.add_argument(
        "--keep-partial",
        action="store_true",
        help="keep a prompt's last block although it is not full; kvtier does not",
    )
    parser.add_argument("--json", action="store_true", help="print a list of cases, in chunks")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for a file that is not a trace."""
    trace = list(read(lines_of(arguments.file), arguments.keep_partial))
    every = unique(trace)
    if not every:
        raise ConfigError(
            f"{arguments.file}: no full block in {len(trace):,} requests, so there is "
            "nothing to keep"
        )
    hinted = _hinted(trace, arguments)
    lower = _size(arguments.nvme, every)
    cases = []
    for policy in arguments.policy:
        for given in arguments.ram:
            slots = max(1, _size(given, every))
            tell = progress(f"{policy} {given}", len(trace))
            result = (
                belady(trace, slots)
                if policy == "belady"
                else simulate(hinted, Cache(slots, lower, policy, arguments.write == "evict"), tell)
            )
            cases.append(Case(policy, slots, 0 if policy == "belady" else lower, result))
    if arguments.json:
        print(msgspec.json.encode([_document(case) for case in cases]).decode())
    else:
        print("\n".join(_screen(cases, trace, every)))
    return 0


def _hinted(trace: Sequence[Request], arguments: argparse.Namespace) -> list[Hinted]:
    if arguments.hints == "oracle":
        return oracle(trace, arguments.cover, arguments.wrong)
    return recorded(trace) if arguments.hints == "recorded" else unhinted(trace)


def _screen(cases: Sequence[Case], trace: Sequence[Request], every: int) -> Iterator[str]:
    asked = sum(len(request.run) for request in trace)
    yield f"{len(trace):,} requests ask for {asked:,} chunks, {every:,} of them different"
    yield ""
    heads = (
        "policy",
        "RAM",
        "NVMe",
        "RAM hits",
        "NVMe hits",
        "hits",
        "NVMe writes",
        "never read",
        "",
    )
    rows = []
    for case in cases:
        result = case.result
        percent = [
            f"{result.percent(each):.2f} %" for each in (result.ram, result.lower, result.hits)
        ]
        writes = (
            [f"{result.writes:,}", f"{result.unread / result.writes:.0%}"]
            if result.writes
            else ["", ""]
        )
        bar = "#" * round(_BAR * result.hits / max(1, result.asked))
        rows.append(
            [
                case.policy,
                f"{case.ram:,}",
                f"{case.nvme:,}" if case.nvme else "",
                *percent,
                *writes,
                bar,
            ]
        )
    yield from table(heads, rows, numbers=range(1, 8))
    refused = sum(case.result.refused for case in cases)
    if refused:
        yield f"{refused:,} chunks had no room beside the others of their prompt"


def _document(case: Case) -> dict[str, object]:
    return {
        "ram_chunks": case.ram,
        "nvme_chunks": case.nvme,
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
