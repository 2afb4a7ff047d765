"""Parts of every benchmark's command: progress, and results as they come."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvtier.core.extras import require
from kvtier.core.terminal import progress

if TYPE_CHECKING:
    from kvtier.bench.requests.client import Outcome


class Arm(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...


NamedArm = TypeVar("NamedArm", bound=Arm)


def failures(kind: str, outcomes: Sequence[Outcome]) -> int:
    """Number of failed requests. The first three errors are printed."""
    failed = [outcome for outcome in outcomes if not outcome.successful]
    for outcome in failed[:3]:
        print(f"a {kind} failed: {outcome.error}", file=sys.stderr)
    return len(failed)


def wrote(files: Sequence[Path]) -> None:
    print("Wrote", ", ".join(map(str, files)))


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: servers stop, and results are told.
    A second one changes nothing, because ``make`` passes on what its group got already."""

    def end(number: int, _: object) -> None:
        for ending in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def measuring(args: argparse.Namespace, tell: Callable[[], object]) -> Iterator[None]:
    """The arms of a benchmark run in this block, with results in ``args.output_dir``. ``tell`` is
    called when an error, Ctrl-C or a signal ends the block early: what was measured so far is not
    lost. Raises KVTierError when a package is missing."""
    require("bench")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with terminable():
        try:
            yield
        except BaseException:
            tell()
            raise


def each_arm(arms: Sequence[NamedArm]) -> Iterator[NamedArm]:
    for number, arm in enumerate(arms, 1):
        say(f"arm {number} of {len(arms)}, {arm.name}: {arm.about}")
        yield arm


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A line before the block, and one with its time after it."""
    say(f"{what} ...")
    begun = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - begun:.0f} s")


def stepping(what: str, total: int) -> Callable[[], None]:
    """Progress of a round of so many steps. A call is one."""
    show, done = progress(what, total), count(1)
    return lambda: show(next(done))
