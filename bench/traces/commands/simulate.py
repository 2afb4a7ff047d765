"""``kvtier simulate FILE``: what caches of given sizes would have hit of recorded requests, and
what compute that would have saved, by policy and hints."""

from __future__ import annotations

import argparse
import gc
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.autoconfig.model import probe_model
from kvtier.bench import figure
from kvtier.bench.flags import between
from kvtier.bench.traces.formats import FORMS, Trace, read
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import (
    FIXED,
    POLICIES,
    Cache,
    Result,
    belady,
    oracle,
    simulate,
    unhinted,
    unique,
)
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import parse_size, progress, table
from kvtier.eviction.saved_compute import SavedCompute, balance

_COLOURS = {"lru": figure.GREY, "auto": figure.GREEN, "belady": figure.ORANGE}
_OTHERS = (figure.SKY, figure.BLUE, figure.RED, figure.PURPLE)
"""Of settings by their names, in turn."""
_LABELS = {"lru": "LRU", "belady": "optimum (Belady), in the room of all tiers"}
_ENDINGS = (".png", ".svg", ".pdf")


class HitPlot:
    """Raises ConfigError for a place where no picture can be written, and ModuleNotFoundError
    without matplotlib: both before anything is simulated."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in _ENDINGS or not path.parent.is_dir():
            raise ConfigError(
                f"--plot {path}: expected a file in an existing folder whose name ends in "
                f"{', '.join(_ENDINGS)}"
            )
        self._path = path
        self._figure, self._axes = figure.subplots(1, 1, height=6)
        self._points: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, policy: str, slots: int, result: Result) -> None:
        """A point: with room for ``slots`` chunks in RAM this policy had this result."""
        self._points[policy].append((slots, result.percent(result.hits)))

    def save(self, title: str) -> None:
        others = cycle(_OTHERS)
        for policy, points in self._points.items():
            slots, hits = zip(*sorted(points), strict=True)
            colour, label = _COLOURS.get(policy) or next(others), _LABELS.get(policy, policy)
            self._axes.plot(slots, hits, marker="o", color=colour, label=label)
        sizes = sorted({slots for points in self._points.values() for slots, _ in points})
        self._axes.set_xscale("log")
        self._axes.minorticks_off()
        self._axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        self._axes.set_ylim(bottom=0)
        self._axes.set_xlabel("chunks in RAM")
        self._axes.set_ylabel("hits, % of the chunks asked for (all tiers)")
        self._axes.grid(alpha=0.3)
        self._axes.legend(loc="lower right", frameon=False)
        figure.title(self._figure, title, (0.06, 0.94))
        figure.save(self._figure, [self._axes], self._path)


_PART = between("between 0 and 1", math.nextafter(0, -1), 1)
_OPTIMUM, _AUTO = "belady", "auto"
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
        help="chunks in RAM, a percentage of all chunks of the trace, or with --model bytes such "
        "as 64GiB; several: one row each",
    )
    add("--nvme", default="0", metavar="SIZE", help="chunks in NVMe, likewise; 0: no such tier")
    add("--redis", default="0", metavar="SIZE", help="chunks in Redis, the lowest tier, likewise")
    add("--write", choices=("save", "evict"), default="evict", help="when NVMe is written")
    policies = (*POLICIES, _OPTIMUM)
    about = "auto chooses among the others; belady: RAM alone"
    add("--policy", nargs="+", choices=policies, default=["lru", "auto"], help=about)
    add_model_flags(parser)
    add(
        "--hints",
        choices=("none", "recorded", "oracle"),
        default="none",
        help="which sessions say that they are over; oracle: each at its end",
    )
    add("--cover", type=_PART, default=1.0, help="oracle: the part of the sessions that say so")
    add(
        "--wrong",
        type=_PART,
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


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Declare for which model saved compute is counted."""
    about = "folder, config.json or hub name: the model whose saved compute is counted"
    parser.add_argument("--model", metavar="DIR_OR_NAME", help=about)
    about = (
        "tokens a second that the engine computes at a prompt's beginning (kvtier plan has an "
        "estimate): saved compute in seconds, too"
    )
    parser.add_argument(
        "--prefill", type=between("tokens a second, more than 0", 0), metavar="TOKENS/S", help=about
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for a file that is not a trace."""
    picture = None if arguments.plot is None else HitPlot(arguments.plot)
    found = read(arguments.file, arguments.format, arguments.keep_partial)
    trace, prefill = found.requests, prefill_of(found, arguments)
    every = _every(trace, arguments)
    gc.freeze()  # a long trace stays: collections of garbage need not walk over it
    rows = list(_cases(trace, every, prefill.saves, arguments))
    if picture is not None:
        _draw(picture, rows, trace)
        picture.save(f"{Path(arguments.file).name}: {every:,} different chunks")
    if arguments.json:
        print(msgspec.json.encode([_document(case, prefill) for case in rows]).decode())
    else:
        print("\n".join(_screen(rows, trace, every, prefill)))
    return 0


def cases(arguments: argparse.Namespace) -> list[Case]:
    found = read(arguments.file, arguments.format, arguments.keep_partial)
    every, saves = _every(found.requests, arguments), prefill_of(found, arguments).saves
    return list(_cases(found.requests, every, saves, arguments))


def _every(trace: Sequence[Request], arguments: argparse.Namespace) -> int:
    """Number of different chunks. Raises ConfigError where there is none."""
    every = unique(trace)
    if not every:
        raise ConfigError(
            f"{arguments.file}: no full block in {len(trace):,} requests, so there is "
            "nothing to keep"
        )
    return every


class ChunkPrefill(NamedTuple):
    """Prefill cost of a trace's chunks for a model."""

    saves: SavedCompute
    tokens_per_s: float | None
    """At a prompt's beginning. None: unknown."""

    def seconds(self, compute: float) -> float | None:
        """Of so many chunks at a prompt's beginning. None where that is unknown."""
        return compute * self.saves.chunk_tokens / self.tokens_per_s if self.tokens_per_s else None


def prefill_of(trace: Trace, arguments: argparse.Namespace) -> ChunkPrefill:
    """By the flags of :func:`add_model_flags`. Raises ConfigError for what is no model, and for a
    trace of objects without tokens where a model or its speed is given."""
    if not trace.block_tokens and (arguments.model or arguments.prefill):
        raise ConfigError(
            f"a {trace.form} trace counts objects and no tokens, so that no prefill is known: "
            "leave --model and --prefill out, or give a trace of prompts"
        )
    saves = SavedCompute(trace.block_tokens)
    if arguments.model:
        model = probe_model(arguments.model)
        parameters, attention = model.active_parameters.value, model.attention_flops.value
        if parameters is None or attention is None:
            why = model.active_parameters.source
            raise ConfigError(f"--model {arguments.model}: its size is not known: {why}")
        saves = SavedCompute(
            trace.block_tokens, balance(parameters, attention), f"of --model {arguments.model}"
        )
    return ChunkPrefill(saves, arguments.prefill)


def _cases(
    trace: Sequence[Request], every: int, saves: SavedCompute, arguments: argparse.Namespace
) -> Iterator[Case]:
    if arguments.hints == "oracle":
        trace = oracle(trace, arguments.cover, arguments.wrong)
    elif arguments.hints == "none":
        trace = unhinted(trace)
    size = _chunk_bytes(arguments, saves)
    nvme, redis = chunks_of(arguments.nvme, every, size), chunks_of(arguments.redis, every, size)
    for policy in arguments.policy:
        for given in arguments.ram:
            slots = max(1, chunks_of(given, every, size))
            if policy == _OPTIMUM:
                yield Case(policy, slots, 0, 0, belady(trace, slots, saves))
                continue
            cache = Cache(slots, nvme, policy, arguments.write == "evict", redis, saves)
            tell = progress(f"{policy} {given}", len(trace))
            yield Case(policy, slots, nvme, redis, simulate(trace, cache, tell))


def _draw(picture: HitPlot, cases: Sequence[Case], trace: Sequence[Request]) -> None:
    below = max(case.nvme + case.redis for case in cases)
    optimum = {} if below else {case.ram: case.result for case in cases if case.policy == _OPTIMUM}
    for case in cases:
        if case.policy != _OPTIMUM:
            picture.add(case.policy, case.ram, case.result)
    for slots in sorted({case.ram for case in cases}):
        picture.add(_OPTIMUM, slots, optimum.get(slots) or belady(trace, slots + below))


def _screen(
    cases: Sequence[Case], trace: Sequence[Request], every: int, prefill: ChunkPrefill
) -> Iterator[str]:
    asked = sum(len(request.run) for request in trace)
    yield f"{len(trace):,} requests ask for {asked:,} chunks, {every:,} of them different"
    yield from _answers(trace)
    yield ""
    tiers = [name for name in ("nvme", "redis") if any(getattr(case, name) for case in cases)]
    heads = ["policy", "RAM", *(_TITLES[name] for name in tiers), "RAM hits"]
    heads += [f"{_TITLES[name]} hits" for name in tiers]
    heads += ["hits", *_saved_heads(prefill)]
    heads += [*(f"{_TITLES[name]} writes (unread)" for name in tiers), ""]
    rows = [[*_cells(case, tiers, prefill)] for case in cases]
    yield from table(heads, rows, numbers=range(1, len(heads) - 1))
    yield from _regrets(cases, prefill)
    yield from _counted_for(prefill.saves)
    refused = sum(case.result.refused for case in cases)
    if refused:
        yield f"{refused:,} chunks had no room beside the others of their prompt"


def _regrets(cases: Sequence[Case], prefill: ChunkPrefill) -> Iterator[str]:
    """For each ``auto``, how far it is below the best of its settings."""
    for case in cases:
        if case.policy == _AUTO:
            best, hits, saved = regret_of(case, cases)
            is_known = saved is not None and prefill.saves.chunk_tokens
            also = f", {saved:.2f} of saved compute" if is_known else ""
            regret = f"regret {hits:.2f} points of hits{also}"
            yield f"auto, RAM {case.ram:,}: best fixed {best}, {regret}"


def regret_of(auto: Case, cases: Sequence[Case]) -> tuple[str, float, float | None]:
    """The setting with most hits in the same room, and how many points of hits and of saved
    compute ``auto`` is below the best of each. Of a setting without a row, its shadow says how much
    of RAM it would have hit, and nothing of saved compute."""
    own, told = auto.result, auto.result.shadows
    rows = {
        one.policy: one.result for one in cases if one.policy in FIXED and one[1:4] == auto[1:4]
    }
    hits = {name: own.percent(own.hits - own.ram) + _shadow(told, name) for name in FIXED}
    hits |= {name: each.percent(each.hits) for name, each in rows.items()}
    best = max(hits, key=hits.__getitem__)
    saved = [max(0.0, each.saved_percent - own.saved_percent) for each in rows.values()]
    by = best if best in rows else f"{best} (by its shadow)"
    regret = max(0.0, hits[best] - own.percent(own.hits))
    return by, regret, max(saved, default=None)


def _shadow(told: Mapping[str, int], name: str) -> float:
    """Hits of a setting's shadow, in per cent of what it was asked for."""
    return 100 * told[f"policy_hits_{name}"] / max(1, told["policy_asked"])


def _answers(trace: Sequence[Request]) -> Iterator[str]:
    """Lengths of answers and why they ended, where the trace has them."""
    answers = [request.output for request in trace if request.output is not None]
    if answers:
        stops = Counter(request.stop for request in trace if request.stop)
        said = [f"{stop} {n / stops.total():.0%}".replace("%", " %") for stop, n in stops.items()]
        ended = f"; they ended by: {', '.join(sorted(said))}" if said else ""
        mean = sum(answers) / len(answers)
        yield f"{len(answers):,} answers have {mean:,.0f} tokens on average{ended}"


def _counted_for(saves: SavedCompute) -> Iterator[str]:
    if saves.chunk_tokens and math.isfinite(saves.s0):
        yield (
            f"saved compute: a token at position {saves.s0:,.0f} takes twice as much as a prompt's "
            f"first one ({saves.source})"
        )
    elif saves.chunk_tokens:
        yield f"saved compute: every token takes the same ({saves.source})"


def _saved_heads(prefill: ChunkPrefill) -> list[str]:
    if not prefill.saves.chunk_tokens:
        return []
    return ["saved compute", *(["in seconds"] if prefill.tokens_per_s else [])]


def _saved(case: Case, prefill: ChunkPrefill) -> Iterator[str]:
    if prefill.saves.chunk_tokens:
        yield f"{case.result.saved_percent:.2f} %"
    if (seconds := prefill.seconds(case.result.saved)) is not None:
        yield f"{seconds:,.0f}"


def _cells(case: Case, tiers: Sequence[str], prefill: ChunkPrefill) -> Iterator[str]:
    result = case.result
    below = {
        "nvme": (case.nvme, result.lower, result.writes, result.unread),
        "redis": (case.redis, result.redis, result.redis_writes, result.redis_unread),
    }
    yield "belady (RAM alone)" if case.policy == _OPTIMUM else case.policy
    yield f"{case.ram:,}"
    yield from (f"{below[name][0]:,}" if below[name][0] else "" for name in tiers)
    for hits in (result.ram, *(below[name][1] for name in tiers), result.hits):
        yield f"{result.percent(hits):.2f} %"
    yield from _saved(case, prefill)
    for _, _, writes, unread in (below[name] for name in tiers):
        yield f"{writes:,} ({unread / writes:.0%})" if writes else ""
    yield "#" * round(_BAR * result.hits / max(1, result.asked))


def _document(case: Case, prefill: ChunkPrefill) -> dict[str, object]:
    return {
        "ram_chunks": case.ram,
        "nvme_chunks": case.nvme,
        "redis_chunks": case.redis,
        "policy": case.policy,
        **case.result._asdict(),
        "saved_s": prefill.seconds(case.result.saved),
    }


def _chunk_bytes(arguments: argparse.Namespace, saves: SavedCompute) -> int | None:
    """The KV of one chunk of the trace. None: the model is not given."""
    if not arguments.model or not saves.chunk_tokens:
        return None
    token = probe_model(arguments.model).kv_bytes_per_token.value
    return None if token is None else token * saves.chunk_tokens


def chunks_of(given: str, every: int, chunk_bytes: int | None = None) -> int:
    """A size in chunks, in per cent of ``every``, or in bytes with their unit where a chunk's are
    known. Raises ConfigError."""
    number, percent = given.removesuffix("%"), given.endswith("%")
    try:
        if chunk_bytes and not percent and not number.isdecimal():
            return parse_size(given) // chunk_bytes
        size = float(number) * every / 100 if percent else int(number)
    except ValueError:
        size = -1
    if not 0 <= size <= _MOST_CHUNKS:
        raise ConfigError(
            f"{given!r} is not a size: give chunks such as 5000, a percentage such as 2.5%, or "
            "with --model bytes such as 64GiB"
        )
    return int(size)
