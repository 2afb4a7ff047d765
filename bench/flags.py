"""Flags that several benchmarks have, and the types of their values."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from kvtier.bench.report import Row, print_rows, write_results

Arm = TypeVar("Arm")
Presets = Mapping[str, Mapping[str, Any]]
"""Shapes of a workload that have a name: their values by field."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def described(about: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a module's text, as it stands."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_micro(
    name: str,
    about: str | None,
    rounds: int,
    measure: Callable[[argparse.Namespace], Sequence[Row]],
    *more: str,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Measure one part by itself, print its rows and write them. ``rounds``: by default. ``more``:
    flags that have a text. ``facts``: more keys of the results."""
    parser = described(about)
    parser.add_argument("--rounds", type=positive, default=rounds)
    default = f"bench/results/{name}.json"
    parser.add_argument("--output", "--out", metavar="FILE", default=default)
    for flag in more:
        parser.add_argument(flag)
    given = parser.parse_args()
    rows = measure(given)
    print_rows(rows)
    write_results(given.output, name, rows, **facts())


def add_run_flags(
    parser: argparse.ArgumentParser,
    name: str,
    target: str,
    arms: Mapping[str, Arm],
    default: tuple[Sequence[Arm] | None, str] | None = None,
) -> None:
    """Declare what is measured and where the results go. ``target``: what ``--base-url`` names.
    ``default``: the arms that run by default, and their name; None: all of them."""
    add = parser.add_argument
    about = "directory or name; with --base-url the name that is served (default: the first)"
    add("--model", help=about)
    about = f"measure this running {target} instead of starting one for each arm"
    add("--base-url", type=url, metavar="URL", help=about)
    chosen_arms, called = default or (list(arms.values()), "all")
    about = f"of {','.join(arms)} (default: {called})"
    add("--arms", type=names_in(arms), default=chosen_arms, help=about)
    about = "for one request (default: 600)"
    add("--request-timeout", type=seconds, default=600.0, metavar="S", help=about)
    about = "exit with 1 when an arm answers differently"
    add("--require-same-tokens", action="store_true", help=about)
    folder = Path("build", name)
    about = f"for {name}.json, pictures and logs (default: {folder})"
    add("--output-dir", type=Path, default=folder, help=about)


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Declare how the vLLM servers are started that the benchmark starts itself."""
    add = group.add_argument
    about = "float32 makes answers comparable bit by bit (default: auto, the model's own)"
    add("--dtype", choices=["auto", *DTYPE_BYTES], default="auto", help=about)
    about = "vLLM's block in tokens (default: 128 on CPU, 16 on GPU)"
    add("--block-size", type=positive, help=about)
    add("--chunk-tokens", type=positive, default=256, help="kvtier's chunk (default: 256)")
    about = "load hits even where computing is sooner, as with a tiny model in a test"
    add("--load-every-hit", action="store_true", help=about)
    about = "more arguments for vLLM, the same for every arm"
    add("--server-args", type=words, default="", metavar="'ARGS'", help=about)
    about = "until a server must be healthy (default: 600)"
    add("--server-timeout", type=seconds, default=600.0, metavar="S", help=about)


def flag(default: Any, about: str, **more: Any) -> Any:
    """A field of a workload's dataclass that is a flag too, of the default's type. ``more`` goes to
    argparse."""
    return field(default=default, metadata={"about": about, **more})


def add_shape(parser: argparse.ArgumentParser, work: type, presets: Presets | None = None) -> None:
    """Declare the flags of a workload's fields. With presets :func:`chosen` has to complete what
    was parsed."""
    kinds: dict[type, Callable[[str], Any]] = {int: positive, float: seconds, str: str}
    for one in _flags(work):
        more = {"type": kinds.get(type(one.default), str), **one.metadata}
        others = [
            f"; {name}: {shape[one.name]}"
            for name, shape in (presets or {}).items()
            if one.name in shape
        ]
        shown = more.pop("shown", one.default)
        about = f"{more.pop('about')} (default: {shown}{''.join(others)})"
        default = one.default if presets is None else None
        parser.add_argument(f"--{one.name.replace('_', '-')}", default=default, help=about, **more)


def chosen(args: argparse.Namespace, work: type, presets: Presets) -> argparse.Namespace:
    """``args`` with every field of the workload: as given, or as ``--preset`` says, or the
    default."""
    preset = presets.get(args.preset or "", {})
    for one in _flags(work):
        if getattr(args, one.name) is None:
            setattr(args, one.name, preset.get(one.name, one.default))
    return args


def shape_of(args: argparse.Namespace, work: type) -> dict[str, Any]:
    return {one.name: getattr(args, one.name) for one in _flags(work)}


def _flags(work: type) -> list[Any]:
    return [one for one in fields(work) if "about" in one.metadata]


def names_in(arms: Mapping[str, Arm]) -> Callable[[str], list[Arm]]:
    def named(text: str) -> list[Arm]:
        unknown = [name for name in text.split(",") if name not in arms]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown arm {', '.join(unknown)}; known: {', '.join(arms)}"
            )
        return [arms[name] for name in text.split(",")]

    return named


def between(what: str, above: float, most: float = float("inf")) -> Callable[[str], float]:
    """The type of a flag: more than ``above`` and at most ``most``. ``what`` it is, in words."""

    def number(text: str) -> float:
        value = float(text)
        if not above < value <= most or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return number


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


seconds = between("a number of seconds", math.nextafter(0, -1))


def url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address; expected for example http://localhost:8000"
        )
    return text


def words(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text
