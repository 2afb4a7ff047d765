"""Writes the generated parts of README.md and of the pages it leads to: the tables of results and
of configuration keys.

``python -m kvtier.bench.readme`` rewrites what stands between ``<!-- begin NAME -->`` and ``<!--
end NAME -->``. A test fails when a page differs from the result files or from the code.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.bench import usual_pairs as pairs
from kvtier.bench.queue.report import shown
from kvtier.config.keys import KEYS, Config
from kvtier.connectors.vllm.naming.fields import DECIDES, DOES_NOT

RESULTS = Path("bench/results")
SHOWN = (
    ("index", "keys + match, all 128", ""),
    ("index", "index memory of a chunk in RAM", ""),
    ("copy", "28 layers x 2 heads x 128, bf16; blocks of 128: save (", "memcpy"),
    ("copy", "28 layers x 2 heads x 128, bf16; blocks of 128: load (", "memcpy"),
    ("copy", "28 layers x 2 heads x 128, bf16; blocks of 16: load (", "memcpy"),
    ("nvme", "NvmeTier write, 2 threads, default (", "raw O_DIRECT"),
    ("nvme", "NvmeTier read, 2 threads, default (", "raw O_DIRECT"),
    ("nvme", "recovery of 100,000 chunks after kill -9", ""),
    ("sealed", "sealed NvmeTier write, 2 threads", "the same without encryption"),
    ("sealed", "sealed NvmeTier read, 2 threads", "the same without encryption"),
    ("redis", "TCP: write", "redis-benchmark SET"),
    ("redis", "TCP: read", "redis-benchmark GET"),
    ("server", "match of 128 chunks, while another engine saves: p99", ""),
    ("server", "save, served", "an embedded Store"),
    ("server", "load, served", "an embedded Store"),
    ("policy", "ram.policy auto adds to a chunk under the lock", ""),
    ("policy", "a chunk in the background", ""),
    ("throttled", "slow tier: TTFT, always", "vLLM without kvtier"),
    ("throttled", "slow tier: TTFT, auto", "vLLM without kvtier"),
    ("in_parts", "1,024 tokens from NVMe: load cost, in parts", "vLLM's disk tier"),
    ("in_parts", "1,024 tokens from RAM: load cost, whole", "vLLM's RAM"),
    ("in_parts", "beside a decoding request, RAM, whole: load cost", "vLLM's RAM"),
    ("in_parts", "beside a decoding request, NVMe, in parts: load cost", "the same load, whole"),
    ("in_parts", "4,096 tokens from NVMe, 8 times RAM: load cost", "direct reads of as many bytes"),
)
"""The rows of the parts' table: the result file, the beginning of the row's name, and what its
ratio is to."""
ON_GPU = (
    ("in_parts_gpu", "1,024 tokens from RAM: load cost, whole", "vLLM's RAM"),
    ("in_parts_gpu", "beside a decoding request, RAM, whole: its longest gap", "vLLM's RAM"),
    ("in_parts_gpu", "beside a decoding request, RAM, whole: load cost", "vLLM's RAM"),
    ("in_parts_gpu", "1,024 tokens from NVMe: load cost, whole", "vLLM's disk tier"),
    (
        "in_parts_gpu",
        "beside a decoding request, NVMe, whole: its longest gap",
        "vLLM's disk tier",
    ),
    ("in_parts_gpu", "beside a decoding request, NVMe, whole: load cost", "vLLM's disk tier"),
    (
        "in_parts_gpu_long",
        "4,096 tokens from NVMe, 8 times RAM: load cost",
        "direct reads of as many bytes",
    ),
    (
        "in_parts_gpu_long",
        "two at the same time, 4,096 tokens from NVMe, 8 times RAM: part of each",
        "a document",
    ),
)
"""As :data:`SHOWN`, of an engine on a GPU."""
_GOOD_DIGITS = 3


def table(rows: list[list[str]]) -> str:
    """Markdown of a table whose first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    digits = f"{value:.{_GOOD_DIGITS}g}" if abs(value) < 10**_GOOD_DIGITS else f"{value:,.0f}"
    return f"{digits} {unit}".strip()


def long_doc_qa() -> str:
    """The main table: one row for each arm of Long Doc QA."""
    found = _read("long_doc_qa")
    arms: Mapping[str, Any] = found["arms"]
    base = arms["none"]["ttft_mean_s"]
    rows = [["arm", "TTFT mean", "p99", "against none", "hit tokens", "tokens as without"]]
    for name, arm in arms.items():
        hits = (
            " + ".join(f"{count:,} {place}" for place, count in arm["hit_tokens"].items() if count)
            or "none"
        )
        same = {True: "yes", False: "no", None: "-"}[arm["same_tokens_as_none"]]
        first, last = number(arm["ttft_mean_s"], "s"), number(arm["ttft_p99_s"], "s")
        rows.append([f"`{name}`", first, last, f"{base / arm['ttft_mean_s']:.1f} x", hits, same])
    return table(rows) + "\n\n" + _origin(found)


def compare() -> str:
    """The peers: what an answer takes, and what else an arm does and costs."""
    found = _read("compare")
    values = {row["name"]: row for row in found["rows"]}
    tables = []
    for columns in (_ANSWERS, _BESIDES):
        rows = [["arm", *columns]]
        for name, arm in found["arms"].items():
            if not arm["cannot_run"]:
                rows.append(
                    [f"`{name}`", *(_compared(values, arm, name, row) for row in columns.values())]
                )
        tables.append(table(rows))
    out = [
        f"`{name}` cannot run: {arm['cannot_run']}."
        for name, arm in found["arms"].items()
        if arm["cannot_run"]
    ]
    return "\n\n".join([*tables, *out, _origin(found)])


def peers() -> str:
    """The peers in short: an arm of each kind, of kvtier and of others."""
    found = _read("compare")
    values = {row["name"]: row for row in found["rows"]}
    rows = [["from", "cache", *_IN_SHORT]]
    for place, names in _KINDS.items():
        for name in names:
            if name not in found["arms"]:
                continue  # it was not asked to run
            cells = [
                _compared(values, found["arms"][name], name, _ANSWERS[one]) for one in _IN_SHORT
            ]
            rows.append([place, f"`{name}`", *cells])
    return table(rows) + "\n\n" + _origin(found)


def multi_turn() -> str:
    """Conversations on two engines: one row for each arm."""
    found = _read("multi_turn")
    values = {row["name"]: row for row in found["rows"]}
    heads = ["arm", "TTFT, turns >= 2", f"against `{next(iter(found['arms']))}`", "not computed"]
    rows = [[*heads, "TTFT after its engine died", "not computed then", "other answers"]]
    for name, arm in found["arms"].items():
        later, share = (
            values[f"{name}: ttft of turns >= 2"],
            values[f"{name}: prompt tokens of turns >= 2 not computed"],
        )
        dead, cells = (
            arm["killed"],
            [f"`{name}`", number(later["value"], "s"), f"{later['ratio']:.2f} x"],
        )
        cells += [
            f"{share['value']:.0%}",
            number(dead["moved_ttft_mean_s"], "s"),
            f"{dead['moved_cached_share']:.0%}",
        ]
        rows.append(
            [*cells, "-" if arm["differing_turns"] is None else str(arm["differing_turns"])]
        )
    return table(rows) + "\n\n" + _origin(found)


def ranks() -> str:
    """One cache server under two engines, and a Store in each."""
    found = _read("ranks")
    values = {row["name"]: row for row in found["rows"]}
    heads = ["arm", "TTFT, turns >= 2", "not computed", "hit tokens", "TTFT, turn 1"]
    rows = [[*heads, "other answers"]]
    for name, arm in found["arms"].items():
        places = arm["hit_tokens"].items()
        cells = [
            number(values[f"{name}: ttft of turns >= 2"]["value"], "s"),
            f"{values[f'{name}: prompt tokens of turns >= 2 not computed']['value']:.0%}",
            " + ".join(f"{count:,} {place}" for place, count in places if count) or "none",
            number(values[f"{name}: ttft of turn 1"]["value"], "s"),
            "-" if arm["differing_turns"] is None else str(arm["differing_turns"]),
        ]
        rows.append([f"`{name}`", *cells])
    return table(rows) + "\n\n" + _origin(found)


def spans() -> str:
    """Prompts with retrieved documents: times beside agreement, one row an arm."""
    found = _read("spans")
    heads = ["arm", "TTFT median", "against none", "TTFT mean", "p99", "prompt tokens computed"]
    heads += ["same first token", "same answer", "first differing token", "first token's KL"]
    heads += ["as with the given order"]
    rows = [[*heads, "warm-up"]]
    out = []
    for name, arm in found["arms"].items():
        if arm["cannot_run"]:
            out.append(f"`{name}` cannot run: {arm['cannot_run']}.")
            continue
        values = {row["name"]: row for row in found["rows"]}
        mean = values[f"{name}: ttft mean"]
        computed = values[f"{name}: prompt tokens computed"]
        median, base = arm["ttft_p50_s"], found["arms"]["none"]["ttft_p50_s"]
        cells = [f"`{name}`", number(median, "s"), f"{median / base:.2f} x"]
        cells += [number(mean["value"], "s"), number(arm["ttft_p99_s"], "s")]
        cells.append(f"{computed['ratio']:.0%}")
        full, given = arm["as_full_prefill"], arm["as_full_prefill_in_the_given_order"]
        cells += [_agreed(full, "same_first_token"), _agreed(full, "same_answer")]
        cells += [_differing(full), _kl(full), _agreed(given, "same_answer")]
        rows.append([*cells, number(arm.get("warm_up_s") or None, "s")])
    return "\n\n".join([table(rows), *out, _origin(found)])


def spans_toy() -> str:
    """The toy's right answers by kind of question, beside the times."""
    found = _read("spans_toy")
    arms = {name: arm for name, arm in found["arms"].items() if not arm["cannot_run"]}
    kinds = list(arms["none"]["by_kind"])
    heads = ["arm", *kinds, "as full prefill", "first token's KL"]
    rows = [[*heads, "prompt tokens computed", "TTFT mean", "warm-up"]]
    for name, arm in arms.items():
        told, full = arm["by_kind"], arm["as_full_prefill"]
        shares = [f"{told[kind]['right'] / told[kind]['asked']:.2f}" for kind in kinds]
        cells = [f"`{name}`", *shares, _agreed(full, "same_first_token"), _kl(full)]
        cells.append(f"{arm['computed_tokens'] / arm['prompt_tokens']:.0%}")
        cells.append(number(arm["ttft_mean_s"], "s"))
        rows.append([*cells, number(arm["warm_up_s"] or None, "s")])
    return table(rows) + "\n\n" + _origin(found)


def _differing(found: Mapping[str, Any] | None) -> str:
    """Median over the answers that differ."""
    median = None if found is None else found["first_differing_token_median"]
    return "-" if median is None else f"{median:g}"


def _kl(found: Mapping[str, Any] | None) -> str:
    told = None if found is None else found.get("first_token_kl")
    return "-" if told is None else f"{told:.2g}"


def _agreed(found: Mapping[str, Any] | None, what: str) -> str:
    return "-" if found is None else f"{found[what]} of {found['compared']}"


_ANSWERS = {
    "TTFT mean": "ttft mean",
    "load cost": "load cost",
    "against kvtier's": "load cost, ratio",
    "CPU s a GiB": "CPU a GiB of hits",
    "against kvtier's CPU": "CPU a GiB of hits, ratio",
    "nothing reused, tokens/s": "throughput, nothing reused",
    "of it in the connector": "connector, of the fill",
}
_IN_SHORT = ("TTFT mean", "load cost", "CPU s a GiB")
_KINDS = {
    "RAM": ("kvtier-ram", "vllm-offloading-ram", "lmcache-ram"),
    "disk": ("kvtier-nvme", "vllm-offloading-disk", "lmcache-disk"),
    "a server": ("kvtier-server",),
    "Redis": ("kvtier-redis", "lmcache-redis"),
}
_BESIDES = {
    "look-up": "look-up",
    "nothing there": "look-up, cold",
    "engine's time a load": "connector, a load",
    "second engine, TTFT": "second engine, ttft mean",
    "after a restart, TTFT": "after a restart, ttft mean",
    "answers unlike none": "answers_unlike_none",
}
"""The columns of the peers' tables, and the ends of their rows' names or what is said of the
arm."""


def _compared(values: Mapping[str, Any], arm: Mapping[str, Any], name: str, what: str) -> str:
    """A cell. An engine that finds nothing of what another has cached is cold, whatever time its
    answer takes."""
    if what in arm:
        return "-" if arm[what] is None else str(arm[what])
    row = values.get(f"{name}: {what.removesuffix(', ratio')}")
    if row is None:
        return "-"
    if what.endswith(", ratio"):
        return "-" if row["ratio"] is None else f"{row['ratio']:.2f} x"
    again = values.get(f"{name}: {what.removesuffix(', ttft mean')}, cached")
    if row["value"] is None:
        return "failed" if what.endswith("ttft mean") else "-"
    if again is not None and not again["value"]:
        return "cold"
    if what == "load cost":
        return f"{row['value'] * 1000:.0f} ms"
    digits = {"s": "", "ms": ".2f", "%": ".1f"}.get(row["unit"], ",.0f")
    unit = "" if row["unit"] == "tokens/s" else row["unit"]
    return (
        f"{row['value']:{digits}} {unit}".strip() if digits else number(row["value"], row["unit"])
    )


def micro() -> str:
    """The numbers of :data:`SHOWN`. The result files have the others."""
    return _numbers(SHOWN)


def engine_on_gpu() -> str:
    """What an engine took on a GPU."""
    found = _read("in_parts_gpu")
    engines = f"vLLM {found['machine']['vllm']}, {found['engines']}"
    return _numbers(ON_GPU) + f"\n\nMeasured on {_gpu_place(found)}; {engines}."


def first_on_gpu() -> str:
    """The rows that a reader with a GPU looks for first: a hit beside one from vLLM's own tier."""
    found = _read("in_parts_gpu")
    rows = [["a hit of 1,024 tokens from", "load cost", "beside the same from vLLM's own"]]
    for place, peer in (("RAM", "vLLM's RAM"), ("NVMe", "vLLM's disk tier")):
        name = f"1,024 tokens from {place}: load cost, whole"
        (row,) = (row for row in found["rows"] if row["name"] == name)
        rows.append([place, number(row["value"], row["unit"]), f"{row['ratio']:.2f} x {peer}"])
    gpu, vllm = found["machine"]["gpu"].partition(",")[0], found["machine"]["vllm"]
    return f"{table(rows)}\n\nOn {gpu}; vLLM {vllm}, {found['engines']}."


def _numbers(shown: Sequence[tuple[str, str, str]]) -> str:
    rows = [["what", "measured", "against", "command"]]
    for name, start, reference in shown:
        found = _read(name)
        row = next(row for row in found["rows"] if row["name"].startswith(start))
        bound = f"asked: {number(row['limit'], row['unit'])}"
        held = bound if row["ratio"] is None else f"{row['ratio']:.0%} of {reference}"
        what = row["name"].partition(" (ratio")[0]
        rows.append([what, number(row["value"], row["unit"]), held, f"`{found['command']}`"])
    return table(rows)


def gpu() -> str:
    """What one rank of each model's shape reaches on a GPU."""
    found = _read("gpu")
    shapes = dict[str, dict[str, Mapping[str, Any]]]()
    for row in found["rows"]:
        name, _, what = row["name"].partition(": ")
        shapes.setdefault(name, {})[what] = row
    rows = [["one rank of", "save", "load", "launches", "to queue it", "a step longer by saving"]]
    for name, own in shapes.items():
        if "save" not in own:
            continue
        cells = [name.partition(";")[0]]
        cells += [f"{number(own[way]['value'])} GB/s ({own[way]['ratio']:.0%})" for way in _WAYS]
        for what, unit in (("kernels launched", ""), ("host time", " ms")):
            both = [_ending(own, f"{way} of", what) for way in _WAYS]
            cells.append(" / ".join(number(row["value"]) for row in both) + unit)
        longer = _ending(own, "a step of", "")
        cells.append(f"{longer['value']:.1f} % ({longer['min']:.1f} to {longer['max']:.1f})")
        rows.append(cells)
    return table(rows) + f"\n\nMeasured with `{found['command']}` on {_gpu_place(found)}."


def _gpu_place(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    return f"{machine['gpu']}, {machine['cores']} cores, torch {machine['torch']}"


_WAYS = ("save", "load")


def _ending(rows: Mapping[str, Mapping[str, Any]], begin: str, end: str) -> Mapping[str, Any]:
    """The row whose name begins and ends so."""
    (row,) = (one for what, one in rows.items() if what.startswith(begin) and what.endswith(end))
    return row


def trust() -> str:
    """What the trust suites did."""
    found = _read("trust")
    rows = [["suite", "cases", "seeds", "faults injected", "violations"]]
    for one in found["suites"]:
        cases = f"{one['cases']:,} {one['unit']}"
        rows.append(
            [
                one["suite"],
                cases,
                f"{one['seeds']:,}",
                f"{one['faults']:,}",
                str(len(one["violations"])),
            ]
        )
    return table(rows) + "\n\n" + _origin(found)


def stuck() -> str:
    """What each fault of a lower tier cost a real engine."""
    found = _read("stuck")
    values = {row["name"]: row for row in found["rows"]}
    rows = [
        [
            "fault",
            "TTFT, against no kvtier",
            "the question when it begins",
            "answers until it is used again",
        ]
    ]
    for name in found["answers"]:
        first = values[f"{name}: first question, more than none"]
        again = values[f"{name}: answers until the tier is used again"]["value"]
        ratio = f"{values[f'{name}: TTFT, auto']['ratio']:.2f} x"
        rows.append([name, ratio, f"{first['value']:+.2f} s", str(int(again))])
    return table(rows) + "\n\n" + _origin(found)


def keys() -> str:
    """Every configuration key."""
    rows = [["key", "variable", "default", "unit", "what for"]]
    for key in KEYS.values():
        default = Config().value(key.flat)
        rows.append(
            [
                f"`{key.path}`",
                f"`{key.variable}`",
                "none" if default is None else f"`{default}`",
                key.unit,
                key.reason,
            ]
        )
    return table(rows)


def cold() -> str:
    """Both tables of what vLLM is configured with."""

    def listed(names: Iterable[str]) -> str:
        sections = defaultdict[str, list[str]](list)
        for name in sorted(names):
            section, _, field = name.partition(".")
            sections[section].append(f"`{field}`")
        return "; ".join(f"*{one}*: {', '.join(fields)}" for one, fields in sections.items())

    reasons = sorted({*DOES_NOT.values()})
    rows = [[why, listed(name for name in DOES_NOT if DOES_NOT[name] == why)] for why in reasons]
    decides = table([["decides"], [listed(DECIDES)]])
    return f"{decides}\n\n{table([['does not decide, because', 'settings'], *rows])}"


def queue() -> str:
    """What people wait for behind a queue of engines, a table for each result."""
    tables = []
    for name in ("queue", "queue_conversation"):
        found = _read(name)
        values, work = {row["name"]: row["value"] for row in found["rows"]}, found["workload"]
        what = f"{work['trace']}: {work['requests']:,} requests, RAM for {work['ram_chunks']:,}"
        tables += [f"{what} chunks of {work['block_tokens']} tokens, {work['engines']} engines:"]
        tables += [table(shown(values, work["policies"])), f"`{found['command']}`"]
    return "\n\n".join(tables)


def usual_pairs() -> str:
    """What ``kvtier plan`` would set for usual pairs of GPU and model."""
    return table(pairs.usual_pairs())


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"long_doc_qa": long_doc_qa, "first_on_gpu": first_on_gpu},
    "deploy/CONFIGURATION.md": {"keys": keys},
    "deploy/COLD.md": {"cold": cold},
    "deploy/SIZING.md": {"usual_pairs": usual_pairs},
    "bench/README.md": {
        "micro": micro,
        "stuck": stuck,
        "compare": compare,
        "peers": peers,
        "queue": queue,
        "gpu": gpu,
        "engine_on_gpu": engine_on_gpu,
        "trust": trust,
        "multi_turn": multi_turn,
        "ranks": ranks,
    },
    "kvtier/extensions/spans/README.md": {"spans": spans, "spans_toy": spans_toy},
}
"""The parts of each page."""


def rewritten(page: str, text: str) -> str:
    """``text`` of this page with every generated part replaced. Raises ValueError when a part has
    no place."""
    for name, make in PAGES[page].items():
        text = replaced(page, text, name, make())
    return text


def replaced(page: str, text: str, name: str, made: str) -> str:
    """``text`` of this page with ``made`` as its part of this name. Raises ValueError when that
    part has no place."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no place for {name}: add {begin.strip()} and {end}")
    return before + begin + made + "\n" + end + after


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _origin(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']} GiB"
    engines = f"vLLM {machine.get('vllm', 'unknown')}"
    engines += f", {found['engines']}" if found.get("engines") else ""
    return f"Measured with `{found['command']}` on {place}; {engines}."


def main() -> None:
    for page in PAGES:
        path = Path(page)
        path.write_text(rewritten(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
