"""Fact: something that was read from the machine, or why it is not known."""

from __future__ import annotations

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
    """The smallest of the facts that are known."""
    return min((fact for fact in facts if fact.value is not None), key=number, default=None)


def number(fact: Fact[int]) -> int:
    """Its value. 0 where that is not known."""
    return fact.value or 0


UNSEEN: Fact[Any] = unknown("not looked at")


def or_assumed(speed: Fact[float], assumed: float, what: str) -> Fact[float]:
    return known(assumed, f"assumed for {what}: {speed.source}") if speed.value is None else speed
