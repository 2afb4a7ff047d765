"""Text for a terminal: sizes, rates and tables, the same in every command, and its parser. Only
:func:`width` and :func:`progress` look at the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

_BAR_COLUMNS = 30
_QUIET_S = 30.0
_PLAIN_BYTES = 1 << 20
"""Least size that needs no unit."""
_WRAPPED_COLUMNS = 40
"""Least width of a wrapped last column. Narrower terminals wrap it themselves."""


def size_text(size: float) -> str:
    """Write a size as ``3.5 GiB``: four significant digits, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def rate_text(rate: float) -> str:
    """Write bytes a second as ``2.5 GB/s``, in decimal units, as disks and networks are sold."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(rate) < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} GB/s"


def printable(text: str) -> str:
    """Escape what a terminal would follow or hide in ``text``. Line ends stay."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def width() -> int | None:
    """Return the columns of the terminal that is standard output. None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    columns: int | None = None,
) -> list[str]:
    """Return the lines of a table. Columns are as wide as their widest cell and two spaces apart.

    The columns in ``numbers`` are aligned to the right. If ``columns`` is the width of a terminal,
    the last column is wrapped within itself, and not at the edge of the terminal.
    """
    whole = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return [line for row in whole for line in _lines(row, widths, numbers, columns)]


def _lines(
    cells: list[str], widths: list[int], numbers: Sequence[int], columns: int | None
) -> Iterator[str]:
    *first, last = (
        cell.rjust(wide) if index in numbers else cell.ljust(wide)
        for index, (cell, wide) in enumerate(zip(cells, widths, strict=True))
    )
    head = "".join(f"{cell}  " for cell in first)
    room = max(_WRAPPED_COLUMNS, columns - len(head)) if columns else len(last)
    wrapped = textwrap.wrap(last.rstrip(), room) if len(last.rstrip()) > room else [last]
    for index, part in enumerate(wrapped):
        yield ((head if index == 0 else " " * len(head)) + part).rstrip()


def progress(what: str, requests: int) -> Callable[[int], None]:
    """Show a progress bar on a terminal, and elsewhere a line every half minute: a log of a long
    run is not silent, and a short run says nothing."""
    on_terminal = sys.stderr.isatty()
    begun = said = time.monotonic()
    every = min(200, max(1, requests // 100))

    def show(done: int) -> None:
        nonlocal said
        if done % every and done != requests:
            return
        now = time.monotonic()
        if not on_terminal and now - said < _QUIET_S:
            return
        said, part = now, done / requests
        left = f"{part:4.0%} {(now - begun) * (1 - part) / part:4.0f} s left"
        end = "\n"
        if on_terminal:
            left = f"{'#' * round(_BAR_COLUMNS * part):{_BAR_COLUMNS}} {left}"
            end = "\r" if done < requests else "\r\033[K"
        sys.stderr.write(f"{what:14} {left}{end}")
        sys.stderr.flush()

    return show


class UnitError(ValueError):
    """A small number without a unit, which means GiB more often than bytes. The text says so."""


def parse_size(given: object) -> int:
    """Parse ``4GiB``, ``4Gi``, ``512MB``, ``1.5 GB``, ``4096B``, ``1073741824``. Raises UnitError
    for less than a MiB without a unit, and ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?b?)\s*", str(given).lower())
    if found is None:
        raise ValueError(given)
    number, unit = found.groups()
    power = " kmgt".index(unit[:1].replace("b", "") or " ")
    size = int(float(number) * (1024 if "i" in unit else 1000) ** power)
    if size < 1:
        raise ValueError(given)
    if not unit and size < _PLAIN_BYTES:
        raise UnitError(f"{number} is {number} bytes: write {number}GiB, or {number}B for bytes")
    return size


def exact_size(size: int) -> str:
    return str(size) if size >= _PLAIN_BYTES else f"{size}B"


_LIKE_PART = 0.6


class Parser(argparse.ArgumentParser):
    """Parser without argparse's screen of usage before an error, and its guesses at short flags."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "allow_abbrev": False})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = self.parse_known_args(args, namespace)
        if others:
            words = [word.partition("=")[0] for word in others]
            flag = next((word for word in words if word.startswith("-")), "")
            near = nearest(flag, self._option_string_actions) if flag else ""
            self.error(f"unrecognized arguments: {' '.join(others)}{near}")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; '{self.prog} --help' shows what there is\n")


def nearest(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1, cutoff=_LIKE_PART)
    return f"; the nearest is {near[0]!r}" if near else ""
