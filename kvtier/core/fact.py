"""Fact: something that was read from the machine or measured on it, or why it is not known. Files
of /proc and /sys are read under a root, so that tests can show a made-up machine."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A fact with its source. ``value`` None means unknown, and then ``source`` says why."""

    value: T | None
    source: str


def known(value: T, source: str) -> Fact[T]:
    return Fact(value, source)


def unknown(reason: str) -> Fact[Any]:
    return Fact(None, reason)


def least(*facts: Fact[int]) -> Fact[int] | None:
    return min((fact for fact in facts if fact.value is not None), key=number, default=None)


def number(fact: Fact[int]) -> int:
    return fact.value or 0


UNSEEN: Fact[Any] = unknown("not looked at")


def or_assumed(speed: Fact[float], assumed: float, what: str) -> Fact[float]:
    return known(assumed, f"assumed for {what}: {speed.source}") if speed.value is None else speed


def rate(step: Callable[[int], int], seconds: float, most: int) -> float:
    """Measure ``step(i)`` in bytes a second: ``most`` calls, or as many as ``seconds`` allow."""
    done, begun, last = 0, time.perf_counter(), 0.0
    for index in range(most):
        done += step(index)
        last = time.perf_counter() - begun
        if last > seconds:
            break
    return done / max(last, 1e-9)


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
    """Read the mounts in /proc/self/mountinfo, see proc(5). Later lines hide earlier ones."""
    found = []
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = [_plain(f) for f in left.split(" ")], [_plain(f) for f in right.split(" ")]
        if len(fields) >= 6 and len(tail) >= 3:
            found.append(Mount(fields[2], fields[3], fields[4], tail[0], tail[1], tail[2]))
    return found


def _plain(escaped: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)
