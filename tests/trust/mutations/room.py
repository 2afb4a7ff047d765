"""What a mutant is, and which tests face the mutants of a room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A small defect.

    In the definition ``where`` the piece of code ``pattern`` stands exactly once and becomes
    ``replacement`` (:mod:`tests.trust.patterns`). ``breaks`` says what that does to a user.
    """

    where: str
    pattern: str
    replacement: str
    breaks: str


@dataclass(frozen=True, slots=True)
class Room:
    """Mutants that face the same suites.

    ``suites`` maps a suite's name to the arguments for Python. They run in this order until one
    fails. The suites in ``slow`` run in ``make trust TRUST=--full`` only.
    """

    suites: Mapping[str, tuple[str, ...]]
    mutants: tuple[Mutant, ...]
    slow: tuple[str, ...] = ()
