"""Rows of the oracle: an engine A, and what an engine B over A's chunks has of its own.

A row knows nothing of what kvtier's keys are made of. It says how B is made out of A, what shows
that the difference was in force, and whether B has to be warm.
"""

import json
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.integration.tiny_models import make_family
from tests.trust.identity.lives import Spec, copied

PROMPT_TOKENS = 257
"""Whole chunks and one token, which even a hit of all has to compute."""
ANSWERS = "answers"
"""In force is what changes the answers of B without kvtier."""

CONTROL = "nothing differs (control)"

Change = Callable[[Spec, Path], Spec]


Stored = Callable[[Spec, Path], Spec]
"""``stored(spec, folder)``: the engine with kvtier over A's place, or over a copy in ``folder``."""


@contextmanager
def of_nvme(folder):
    """A folder. A's own is the first that is asked for, each of the others begins as a copy of what
    A left."""
    first = folder / "nvme"

    def stored(spec, place):
        nvme = first
        if first.exists():
            nvme = copied(first, place / "nvme")
        return spec.with_tiers(nvme_path=nvme, nvme_bytes="64MiB")

    yield stored


@dataclass(frozen=True)
class Base:
    """Engine A. ``make`` is given a folder of its own, and so is ``place``, which says where chunks
    are kept. ``beside``: A lives until its last B has ended. ``split``: what a prefill in short
    steps gives is measured, because rows ask for it. ``swept``: see :mod:`.sweep`."""

    name: str
    make: Callable[[Path], Spec]
    place: Callable[[Path], AbstractContextManager[Stored]] = of_nvme
    beside: bool = False
    split: bool = False
    swept: bool = False


@dataclass(frozen=True)
class Row:
    """``change`` makes B out of A's specification, in a folder of the row's own. ``force``: facts
    of B (see ``life.facts``) that A has otherwise, or :data:`ANSWERS`; None: nothing can show it.
    ``warm``: B has to find what A kept. ``slice``: part of ``make test``. ``planted``: the keys of
    both are spoilt, and the oracle has to see it."""

    name: str
    base: str
    change: Change
    force: Mapping[str, str] | str | None = ANSWERS
    warm: bool = False
    slice: bool = False
    planted: bool = False


def document(seed, tokens=PROMPT_TOKENS):
    draw = random.Random(seed)
    return [draw.randrange(10, 400) for _ in range(tokens)]


PROMPTS: tuple[Mapping[str, Any], ...] = tuple({"tokens": document(seed)} for seed in (1, 2))
WORDS = " ".join(f"{'abcdefgh'[n % 8]}{n * n % 97}" for n in range(90))
SPOKEN: tuple[Mapping[str, Any], ...] = (
    {"text": WORDS},
    {"chat": [{"role": "system", "content": WORDS}, {"role": "user", "content": "Why is it so?"}]},
)


def family(model_type="llama", **more):
    """A tiny model of two layers."""

    def make(folder):
        sizes = {"num_hidden_layers": 2, "hidden_act": "silu"} | more
        return Spec(make_family(folder / "model", model_type, **sizes), PROMPTS)

    return make


def engine(**more):
    return lambda spec, _: spec.engine_with(**more)


def switch(room="", base="tiny", *, warm=False, **given):
    """A row of one argument of the engine. In force where its configuration's ``room`` has it;
    without a room nothing shows it."""
    ((name, value),) = given.items()
    shown = {f"{room}.{name}": str(value)} if room else None
    return Row(f"{name} {value}", base, engine(**given), shown, warm=warm)


def environment(**more):
    return lambda spec, _: spec.environment_with(**more)


def own_model(spec, folder):
    """B with a copy of A's model."""
    model = copied(spec.model, folder / "model")
    return replace(spec, model=model), model


def config(*path, value, of="config.json"):
    """Another value in a JSON file of the model's folder."""

    def change(spec, folder):
        spec, model = own_model(spec, folder)
        edit(model / of, *path, value=value)
        return spec

    return change


def edit(file, *path, value):
    whole = json.loads(file.read_text())
    inner = whole
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    file.write_text(json.dumps(whole))


def file_changed(edit_model):
    """``edit_model`` is given B's copy of the model's folder."""

    def change(spec, folder):
        spec, model = own_model(spec, folder)
        edit_model(model)
        return spec

    return change
