"""The identity oracle: ``python -m tests.trust.identity [--slice | --sweep] [--only WORD ...]
[--out FILE]``.

Real engines in pairs over one folder: A saves, B differs from A in one thing. B is compared with B
alone. It answers the same, or it found nothing of A's. The oracle knows nothing of what kvtier's
keys are made of. Every row is printed with its verdict. Exit status 1: a row is wrong, or cold
where warmth was promised. Status 2: nothing was tested, because a control was cold, or a planted
fault was not seen.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.bench.report import write_results
from tests.trust.identity.catalogue import BASES, ROWS
from tests.trust.identity.compared import allowed, apart, farthest, hits, noise, own_hits
from tests.trust.identity.lives import EngineFailedError, Lives, Spec
from tests.trust.identity.rows import ANSWERS, CONTROL, Stored
from tests.trust.identity.sweep import of_engine, of_model

WRONG, COLD = "WRONG", "COLD WHERE WARM WAS PROMISED"
SEEN, BLIND = "wrong as planted", "THE ORACLE IS BLIND"
NOT_IN_FORCE, NO_START = "not in force", "does not start"


@dataclass
class Kept:
    """Engine A: what it said with kvtier and alone, and what it left."""

    spec: Spec
    ours: Mapping[str, Any]
    alone: Mapping[str, Any]
    noise: float
    stored: Stored


@dataclass
class Told:
    """A row's outcome. ``differs``: how far B alone lies from A alone. ``apart``: how far B lies
    from B alone, of what ``allowed``."""

    name: str
    base: str
    verdict: str
    tokens: int = 0
    differs: float = 0.0
    apart: float = 0.0
    allowed: float = 0.0
    seconds: float = 0.0
    why: str = ""


@contextmanager
def living(lives, base, folder):
    """Live A. One that has its Bs beside it ends with the block."""
    spec = base.make(folder / "a")
    alone = lives.told(spec)
    steps = spec.engine_with(max_num_batched_tokens=96, max_num_seqs=8)
    found = noise(alone, lives.told(steps) if base.split else None)
    with base.place(folder) as stored:
        ours = stored(spec, folder)
        with held(lives, ours, folder) if base.beside else nullcontext(lives.told(ours)) as told:
            if not apart(told, alone) <= allowed(found) < math.inf:
                raise EngineFailedError(f"Error: A answers itself otherwise, by {found}")
            yield Kept(spec, told, alone, found, stored)


@contextmanager
def held(lives, spec, folder):
    """The engine has answered, and lives until the block ends."""
    hold = folder / "hold"
    for name in (hold, Path(f"{hold}.told")):
        os.mkfifo(name)
    out: list[Path] = []
    with ThreadPoolExecutor(1) as pool:
        life = pool.submit(lives.told, replace(spec, hold=hold), out.append)
        life.add_done_callback(lambda _: _opened(f"{hold}.told"))
        Path(f"{hold}.told").read_text()
        if life.done():
            life.result()
        try:
            yield json.loads(out[0].read_text())
        finally:
            hold.write_text("end")
            life.result()


def _opened(fifo):
    """Whoever still waits for words reads none."""
    with suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def judged(lives, row, kept, folder):
    """Live B, with what A left and alone."""
    begin = time.monotonic()
    told = Told(row.name, row.base, "")
    try:
        folder.mkdir(parents=True)
        spec = row.change(kept.spec, folder)
        alone = lives.told(spec)
        told.allowed = allowed(kept.noise, noise(alone))
        told.differs = farthest(kept.alone["answers"][0], alone["answers"][0])
        told.why = missing(row, kept, alone, told)
        ours = lives.told(kept.stored(spec, folder))
        told.tokens, told.apart = sum(hits(ours)), apart(ours, alone)
        told.verdict = verdict(row, told, sum(own_hits(kept.ours)))
    except EngineFailedError as error:
        told.verdict, told.why = NO_START, error.last
        (folder / "failed.log").write_text(str(error))
    shutil.rmtree(folder / "nvme", ignore_errors=True)
    told.seconds = round(time.monotonic() - begin, 1)
    return told


def missing(row, kept, alone, told):
    """Why the difference was not in force. "" when it was."""
    if told.allowed == math.inf:
        return "B alone answers itself otherwise"
    if row.force is None:
        return ""
    if isinstance(row.force, str):
        assert row.force == ANSWERS
        return "" if told.differs > told.allowed else f"answers differ by {told.differs}"
    for name, value in row.force.items():
        found, before = alone["facts"].get(name), kept.alone["facts"].get(name)
        if found is None or value not in found or found == before:
            return f"{name} is {found}, was {before}"
    return ""


def verdict(row, told, whole):
    """``whole``: tokens of A's prompts that can be hits."""
    wrong = told.apart > told.allowed
    if row.planted:
        return SEEN if wrong else BLIND
    if wrong:
        return WRONG
    if told.why:
        return NOT_IN_FORCE
    if row.warm and told.tokens < whole:
        return COLD
    return f"equal, warm ({told.tokens} tokens)" if told.tokens else "equal, cold"


def swept(bases, kept):
    """Rows that nobody thought of, of the bases that ask for them."""
    for base in bases:
        began = kept.get(base.name)
        if base.swept and isinstance(began, Kept):
            yield from of_model(base.name, began.spec.model)
            if base.split:
                yield from of_engine(base.name)


def run(rows, folder, at_once=2, *, sweep=False):
    """All rows, two engines at once. ``sweep``: and those of :mod:`.sweep`."""
    with (
        Lives(folder / "lives", at_once) as lives,
        ThreadPoolExecutor(at_once) as pool,
        ExitStack() as stack,
    ):

        def began(base):
            try:
                return stack.enter_context(living(lives, base, folder / base.name))
            except EngineFailedError as error:
                return f"A: {error.last}"

        def one(row, kept):
            place = folder / row.base / re.sub(r"\W+", "_", row.name)
            if isinstance(kept, str):
                told = Told(row.name, row.base, NO_START, why=kept)
            else:
                told = judged(lives, row, kept, place)
            said(line(told))
            return told

        found = list[Told]()
        names = {row.base for row in rows}
        bases = [base for base in BASES if base.name in names]
        apart = [base for base in bases if not base.beside]
        kept = dict(zip([base.name for base in apart], pool.map(began, apart), strict=True))
        rows = [*rows, *swept(bases, kept)] if sweep else rows
        found += pool.map(lambda row: one(row, kept[row.base]), [r for r in rows if r.base in kept])
        for base in bases:
            if base.beside:
                own = began(base)
                found += [one(row, own) for row in rows if row.base == base.name]
                stack.close()
        return found


def said(words):
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def line(told):
    numbers = f"{told.differs:9.2e} {told.apart:9.2e} {told.seconds:6.1f} s"
    return f"{told.base:12} {told.name:58} {numbers}  {told.verdict}" + (
        f": {told.why}" if told.why else ""
    )


def status(told):
    """Of the program."""
    cold = [one for one in told if CONTROL in one.name and "warm" not in one.verdict]
    if cold or any(one.verdict == BLIND for one in told):
        return 2
    return int(any(one.verdict in (WRONG, COLD) for one in told))


def main():
    parser = argparse.ArgumentParser(prog="tests.trust.identity", description=__doc__)
    parser.add_argument("--slice", action="store_true", help="what make test runs")
    parser.add_argument("--sweep", action="store_true", help="every field, every switch; longer")
    parser.add_argument("--only", nargs="+", default=[], help="rows or bases with this in the name")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--keep", type=Path, help="leave the logs and folders here")
    given = parser.parse_args()
    rows = [
        row
        for row in ROWS
        if (row.slice or not given.slice)
        and (not given.only or any(word in f"{row.base} {row.name}" for word in given.only))
    ]
    folder = given.keep or Path(tempfile.mkdtemp(prefix="identity-"))
    begin = time.monotonic()
    try:
        told = run(rows, folder, sweep=given.sweep)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    counts: dict[str, int] = {}
    for one in told:
        kind = re.sub(r" \(.*", "", one.verdict)
        counts[kind] = counts.get(kind, 0) + 1
    said(f"{len(told)} rows in {time.monotonic() - begin:.0f} s: {counts}")
    if given.out:
        pairs = [
            {name: None if value == math.inf else value for name, value in asdict(one).items()}
            for one in told
        ]
        write_results(given.out, "trust_identity", [], counts=counts, pairs=pairs)
    return status(told)


if __name__ == "__main__":
    sys.exit(main())
