"""What every benchmark does as a command: progress bars, an end on SIGTERM, and errors as one
line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.parser import Parser
from kvtier.core.errors import KVTierError

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvtier.bench.requests.client import Outcome


def run_command(
    name: str,
    about: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse, run, and tell an error. The exit status."""
    parser = Parser(prog=f"kvtier.bench.{name}", description=about)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KVTierError as error:
        print(f"{name.replace('_', '-')}: {error}", file=sys.stderr)
        return 2


def failures(kind: str, outcomes: Sequence[Outcome]) -> int:
    """How many requests failed. The first three errors are printed."""
    failed = [outcome for outcome in outcomes if not outcome.successful]
    for outcome in failed[:3]:
        print(f"a {kind} failed: {outcome.error}", file=sys.stderr)
    return len(failed)


def wrote(files: Sequence[Path]) -> None:
    """Say where the results are."""
    print("Wrote", ", ".join(map(str, files)))


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM stops the servers as Ctrl-C does, instead of leaving them behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns: tuple[Any, ...] = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


@contextmanager
def waiting(progress: Progress, what: str) -> Iterator[None]:
    """A bar of unknown length for as long as the block takes."""
    task = progress.add_task(what, total=None)
    yield
    progress.remove_task(task)


def stepping(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """A bar of ``total`` steps. A call is one step."""
    task = progress.add_task(what, total=total)
    return lambda: progress.advance(task)
