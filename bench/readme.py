"""Writes the generated parts of README.md and of the pages it leads to: the tables of results and
of configuration keys.

``python -m kvtier.bench.readme`` rewrites what stands between ``<!-- begin NAME -->`` and ``<!--
end NAME -->``. A test fails when a page differs from the result files or from the code.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench import usual_pairs as pairs
from kvtier.bench.long_doc_qa import report as long_doc_qa
from kvtier.bench.multi_turn import report as multi_turn
from kvtier.bench.queue import report as waits
from kvtier.bench.report import Found, by_arm, named, number, or_dash
from kvtier.bench.spans import report as spans
from kvtier.config.keys import KEYS, Config
from kvtier.connectors.vllm.naming.fields import DOES_NOT

RESULTS = Path("bench/results")
_WAYS = ("save", "load")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a table whose first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _origin(found: Found) -> str:
    machine = found["machine"]
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']} GiB"
    engines = f"vLLM {machine.get('vllm', 'unknown')}"
    engines += f", {found['engines']}" if found.get("engines") else ""
    return f"Measured with `{found['command']}` on {place}; {engines}."


def _gpu_place(found: Found) -> str:
    machine = found["machine"]
    return f"{machine['gpu']}, {machine['cores']} cores, torch {machine['torch']}"


# ---- rows that a page names itself ---------------------------------------------------------------


class Rows(NamedTuple):
    """A table whose first column names rows of these results. What a ratio is to stands in the page
    too. ``end``: what follows the table."""

    files: tuple[str, ...]
    end: Callable[[], str] = str

    def refreshed(self, text: str) -> str:
        results = [_read(name) for name in self.files]
        known = {
            name.partition(" (ratio")[0]: (row, found["command"])
            for found in results
            for name, row in named(found).items()
        }
        lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        for cells in lines[2:]:
            row, command = known[cells[0]]
            asked = f"asked: {number(row['limit'], row['unit'])}"
            held = re.sub(r"^\d+%", f"{row['ratio'] or 0:.0%}", cells[2])
            held = asked if row["ratio"] is None else held
            cells[1:] = [number(row["value"], row["unit"]), held, f"`{command}`"]
        last = ""
        for cells in lines[2:]:  # a command stands once, at the first of its rows
            last, cells[3] = cells[3], "" if cells[3] == last else cells[3]
        return table([lines[0], *lines[2:]]) + self.end()


def _gpus_engines() -> str:
    found = _read("in_parts_gpu")
    engines = f"vLLM {found['machine']['vllm']}, {found['engines']}"
    return f"\n\nMeasured on {_gpu_place(found)}; {engines}."


# ---- tables of arms ------------------------------------------------------------------------------


def _of_arms(name: str, shown: Callable[[Found], list[list[str]]], *more: str) -> str:
    """The table of a benchmark's arms, with those that cannot run."""
    found = _read(name)
    out = [
        f"`{one}` cannot run: {arm['cannot_run']}."
        for one, arm in found["arms"].items()
        if arm.get("cannot_run")
    ]
    return "\n\n".join([table(shown(found)), *more, *out, _origin(found)])


_ANSWERS = {
    "TTFT mean": "ttft mean",
    "load cost": "load cost",
    "against kvtier's": "load cost, ratio",
    "CPU s a GiB": "CPU a GiB of hits",
    "against kvtier's CPU": "CPU a GiB of hits, ratio",
    "nothing reused, tokens/s": "throughput, nothing reused",
    "of it in the connector": "connector, of the fill",
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


def compare() -> str:
    """The peers: what an answer takes, and what else an arm does and costs."""
    values = named(_read("compare"))

    def shown(columns: Mapping[str, str], found: Found) -> list[list[str]]:
        return by_arm(
            found,
            [*columns],
            lambda name, arm: [_compared(values, arm, name, row) for row in columns.values()],
        )

    second = table(shown(_BESIDES, _read("compare")))
    return _of_arms("compare", partial(shown, _ANSWERS), second)


def _compared(values: Mapping[str, Found], arm: Found, name: str, what: str) -> str:
    """A cell. An engine that finds nothing of what another has cached is cold, whatever time its
    answer takes."""
    if what in arm:
        return or_dash(arm[what])
    row = values.get(f"{name}: {what.removesuffix(', ratio')}")
    if row is None:
        return "-"
    if what.endswith(", ratio"):
        return "-" if row["ratio"] is None else f"{row['ratio']:.2f} x"
    if row["value"] is None:
        return "failed" if what.endswith("ttft mean") else "-"
    again = values.get(f"{name}: {what.removesuffix(', ttft mean')}, cached")
    if again is not None and not again["value"]:
        return "cold"
    if what == "load cost":
        return f"{row['value'] * 1000:.0f} ms"
    digits = {"s": "", "ms": ".2f", "%": ".1f"}.get(row["unit"], ",.0f")
    unit = "" if row["unit"] == "tokens/s" else row["unit"]
    return f"{row['value']:{digits}} {unit}".strip() if digits else number(row["value"], unit)


# ---- other tables --------------------------------------------------------------------------------


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


def gpu() -> str:
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


def _ending(rows: Mapping[str, Mapping[str, Any]], begin: str, end: str) -> Mapping[str, Any]:
    """The row whose name begins and ends so."""
    (row,) = (one for what, one in rows.items() if what.startswith(begin) and what.endswith(end))
    return row


def trust() -> str:
    found = _read("trust")
    rows = [["suite", "cases", "seeds", "faults injected", "violations"]]
    for one in found["suites"]:
        counts = [f"{one['cases']:,} {one['unit']}", f"{one['seeds']:,}", f"{one['faults']:,}"]
        rows.append([one["suite"], *counts, str(len(one["violations"]))])
    return table(rows) + "\n\n" + _origin(found)


def stuck() -> str:
    found = _read("stuck")
    values = named(found)
    heads = ["TTFT, against no kvtier", "the question when it begins"]
    rows = [["fault", *heads, "answers until it is used again"]]
    for name in found["answers"]:
        first = values[f"{name}: first question, more than none"]["value"]
        again = values[f"{name}: answers until the tier is used again"]["value"]
        ratio = values[f"{name}: TTFT, auto"]["ratio"]
        rows.append([name, f"{ratio:.2f} x", f"{first:+.2f} s", str(int(again))])
    return table(rows) + "\n\n" + _origin(found)


def keys() -> str:
    rows = [["key", "variable", "default", "unit", "what for"]]
    for key in KEYS.values():
        default = Config().value(key.flat)
        shown = "none" if default is None else f"`{default}`"
        rows.append([f"`{key.path}`", f"`{key.variable}`", shown, key.unit, key.reason])
    return table(rows)


def cold() -> str:
    def listed(names: Iterable[str]) -> str:
        sections = defaultdict[str, list[str]](list)
        for name in sorted(names):
            section, _, field = name.partition(".")
            sections[section].append(f"`{field}`")
        return "; ".join(f"*{one}*: {', '.join(fields)}" for one, fields in sections.items())

    reasons = sorted({*DOES_NOT.values()})
    rows = [[why, listed(name for name in DOES_NOT if DOES_NOT[name] == why)] for why in reasons]
    return table([["does not decide, because", "settings"], *rows])


def queue() -> str:
    tables = []
    for name in ("queue", "queue_conversation"):
        found = _read(name)
        values, work = {row["name"]: row["value"] for row in found["rows"]}, found["workload"]
        what = f"{work['trace']}: {work['requests']:,} requests, RAM for {work['ram_chunks']:,}"
        tables += [f"{what} chunks of {work['block_tokens']} tokens, {work['engines']} engines:"]
        tables += [table(waits.shown(values, work["policies"])), f"`{found['command']}`"]
    return "\n\n".join(tables)


def usual_pairs() -> str:
    return table(pairs.usual_pairs())


_PARTS = (
    *("index", "copy", "nvme", "sealed", "redis", "server", "step", "policy", "throttled"),
    *("worker", "in_parts", "disks_engine", "tier", "sglang"),
)
"""Results that the table of the parts has rows of."""
PAGES: dict[str, dict[str, Callable[[], str] | Rows]] = {
    "README.md": {
        "long_doc_qa": partial(_of_arms, "long_doc_qa", long_doc_qa.shown),
        "first_on_gpu": first_on_gpu,
    },
    "deploy/CONFIGURATION.md": {"keys": keys},
    "deploy/COLD.md": {"cold": cold},
    "deploy/SIZING.md": {"usual_pairs": usual_pairs},
    "bench/README.md": {
        "micro": Rows(_PARTS),
        "stuck": stuck,
        "compare": compare,
        "queue": queue,
        "gpu": gpu,
        "engine_on_gpu": Rows(("in_parts_gpu", "in_parts_gpu_long"), _gpus_engines),
        "trust": trust,
        "multi_turn": partial(_of_arms, "multi_turn", multi_turn.shown),
        "ranks": partial(_of_arms, "ranks", multi_turn.shown),
    },
    "kvtier/extensions/spans/README.md": {
        "spans": partial(_of_arms, "spans", spans.shown),
        "spans_toy": partial(_of_arms, "spans_toy", spans.shown_toy),
    },
}


def rewritten(page: str, text: str) -> str:
    """``text`` of this page with every generated part replaced. Raises ValueError when a part has
    no place."""
    for name, make in PAGES[page].items():
        before = _between(page, text, name)[1]
        made = make.refreshed(before) if isinstance(make, Rows) else make()
        text = replaced(page, text, name, made)
    return text


def replaced(page: str, text: str, name: str, made: str) -> str:
    """``text`` of this page with ``made`` as its part of this name. Raises ValueError when that
    part has no place."""
    before, _, after = _between(page, text, name)
    return f"{before}{made}\n{after}"


def _between(page: str, text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    part, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no place for {name}: add {begin.strip()} and {end}")
    return before + begin, part, end + after


def main() -> None:
    for page in PAGES:
        path = Path(page)
        path.write_text(rewritten(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
