"""Fact: something that was read from the machine or measured on it, or why it is not known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One fact. ``value`` None means unknown, and then ``source`` says why."""

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
    """Bytes a second of ``step(i)``. It is called at least once, and at most for ``most`` steps or
    ``seconds``."""
    done, begun, last = 0, time.perf_counter(), 0.0
    for index in range(most):
        done += step(index)
        last = time.perf_counter() - begun
        if last > seconds:
            break
    return done / max(last, 1e-9)
