"""Writes the parts of README.md that are never typed: the tables of results and of configuration keys.

``python -m kvtier.bench.readme`` rewrites what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; a test
fails when README and the result files or the code say different things.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.config import KEYS, Config

RESULTS = Path("bench/results")
README = Path("README.md")
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
    """The main table: one row an arm of Long Doc QA."""
    found = _read("long_doc_qa")
    arms: Mapping[str, Any] = found["arms"]
    base = arms["none"]["ttft_mean_s"]
    rows = [["arm", "TTFT mean", "p99", "against none", "hit tokens", "tokens as without"]]
    for name, arm in arms.items():
        hits = " + ".join(f"{count:,} {place}" for place, count in arm["hit_tokens"].items() if count) or "none"
        same = "yes" if arm["same_tokens_as_none"] else "no"
        first, last = number(arm["ttft_mean_s"], "s"), number(arm["ttft_p99_s"], "s")
        rows.append([f"`{name}`", first, last, f"{base / arm['ttft_mean_s']:.1f} x", hits, same])
    return table(rows) + "\n\n" + _origin(found)


def micro() -> str:
    """One row for each number of the micro benchmarks that is held against a limit of the same run."""
    rows = [["what", "measured", "of the limit in the same run", "command"]]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            if found["benchmark"] == "long-doc-qa" or (row["ratio"] is None and row["limit"] is None):
                continue
            held = f"{row['ratio']:.2f}" if row["ratio"] is not None else f"bound {number(row['limit'], row['unit'])}"
            rows.append([row["name"], number(row["value"], row["unit"]), held, f"`{found['command']}`"])
    return table(rows)


def keys() -> str:
    """Every configuration key."""
    rows = [["key", "default", "unit", "what for"]]
    for key, about in KEYS.items():
        default = getattr(Config(), key)
        rows.append([f"`{key}`", "none" if default is None else f"`{default}`", about["unit"], about["reason"]])
    return table(rows)


PARTS: dict[str, Callable[[], str]] = {"long_doc_qa": long_doc_qa, "micro": micro, "keys": keys}


def rewritten(text: str) -> str:
    """``text`` with every generated part made anew. Raises ValueError when a part has no place."""
    for name, make in PARTS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"README has no place for {name}: add {begin.strip()} and {end}")
        text = before + begin + make() + "\n" + end + after
    return text


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _origin(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    facts = ", ".join(str(machine[key]) for key in ("cpu", "cores", "ram_gib") if key in machine)
    return f"Measured with `{found['command']}` on: {facts or 'see the result file'}."


def main() -> None:
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
