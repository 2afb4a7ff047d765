"""Facts of /proc and /sys, read under a root, so that tests can show a made-up machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvtier.core.fact import Fact, known, unknown

T = TypeVar("T")

ROOT = Path("/")


def fact_of(look: Callable[[], T], what: str) -> Fact[T]:
    try:
        return known(look(), what)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return unknown(f"{what}: {error}")


def text_of(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


class Mount(NamedTuple):
    device: str
    top: str
    point: str
    kind: str
    source: str
    options: str


def mounts(root: Path) -> list[Mount]:
    """Mounts in /proc/self/mountinfo, see proc(5). Later lines hide earlier ones."""
    found = []
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = [_plain(f) for f in left.split(" ")], [_plain(f) for f in right.split(" ")]
        if len(fields) >= 6 and len(tail) >= 3:
            found.append(Mount(fields[2], fields[3], fields[4], tail[0], tail[1], tail[2]))
    return found


def _plain(escaped: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)
