"""One arm of :mod:`kvtier.bench.compare.alone` in a process of its own. It times what it is asked
to do.

It is the same for every cache, so that all are measured in the same way. The process gets its
:class:`Setting` as its only argument. It measures once to warm up, and compares every byte that it
loads. Then it measures once for every line that it reads. Each time it prints one line of JSON with
the value of each metric. It is imported in peers' environments too.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from kvtier.bench.compare.memory import cpu_seconds

GIB = 1 << 30
SAVE, WRITE, DURABLE, LOAD = "save", "write", "durable write", "load"
SAVE_CPU, LOAD_CPU = "CPU a GiB saved", "CPU a GiB loaded"
HIT, MISS, MATCH_HIT, MATCH_MISS = (
    "look-up, hit",
    "look-up, miss",
    "match alone, hit",
    "match alone, miss",
)
_VOCABULARY = 150_000
_WARM_UPS = 3
"""After so many rounds every place has the memory that it needs. Pages that are touched for the
first time cost seconds a GiB."""
_POLL_S = 0.0005
PATIENCE_S = 60.0


class WrongError(Exception):
    """A cache did not do what it is measured for. Its numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine's KV: bf16, as vLLM's CPU backend lays it out. ``chunks``: of a prompt that is
    saved and loaded. ``looked_up``: chunks of a prompt that is looked up ``look_ups`` times.
    ``step_tokens``: the engine saves after each step of so many."""

    layers: int = 28
    heads: int = 2
    head_size: int = 128
    block_tokens: int = 128
    chunk_tokens: int = 256
    step_tokens: int = 2048
    chunks: int = 64
    looked_up: int = 128
    look_ups: int = 50

    @property
    def chunk_bytes(self) -> int:
        return 4 * self.layers * self.chunk_tokens * self.heads * self.head_size

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def blocks(self) -> int:
        return self.chunks * self.blocks_per_chunk

    @property
    def prompt_bytes(self) -> int:
        return self.chunks * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """``place``: the arm's own word for where it keeps chunks. ``at``: that place's folder or
    address. ``beside``: the process whose CPU time counts for the arm too."""

    place: str
    at: str = ""
    beside: int | None = None
    sizes: Sizes = field(default_factory=Sizes)

    def told(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Setting:
        parts = json.loads(text)
        return cls(**{**parts, "sizes": Sizes(**parts["sizes"])})


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where the engine keeps its KV: the ids of its blocks, and the slots of its tokens."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    slots: torch.Tensor


class Cache(Protocol):
    """What is measured. Every method raises :class:`WrongError` when it did less than it was asked
    for."""

    keeps_below: bool
    """Chunks lie in a tier below RAM, and loads come from there."""
    looks_up: bool

    def save(self, prompt: Prompt, start: int, end: int) -> None:
        """Save tokens ``start`` to ``end`` of it, which a step of the engine has computed. The
        others were saved before."""
        ...

    def settled(self) -> bool:
        """Whether everything that was saved is in the place where it is kept."""
        ...

    def announce(self, prompt: Prompt) -> None:
        """It will be loaded. An engine asks this first, where it saves time in the load. This is
        not measured."""
        ...

    def load(self, prompt: Prompt) -> None:
        """Load all of it into its blocks. Where ``keeps_below`` is set, it comes from there
        only."""
        ...

    def forget(self, prompt: Prompt) -> None:
        """Make room. This is not measured."""
        ...

    def look_up(self, tokens: Sequence[int]) -> tuple[float, float | None]:
        """How many tokens of it are held, and the seconds of the match alone where it can be
        separated."""
        ...

    def end_look_up(self) -> None:
        """Release what the lookup pinned. This is not measured."""
        ...


def cpu_clock(beside: int | None) -> Callable[[], float]:
    """CPU seconds of this process with its threads, and of the process ``beside`` it."""
    return partial(cpu_seconds, [os.getpid(), *([] if beside is None else [beside])])


def engine_kv(sizes: Sizes) -> torch.Tensor:
    """``[layer, block, head, token, keys and values]``, random bytes."""
    shape = (sizes.layers, sizes.blocks, sizes.heads, sizes.block_tokens, 2 * sizes.head_size)
    kv = torch.empty(shape, dtype=torch.bfloat16)
    kv.view(torch.uint8).random_(0, 256)
    return kv


class Turns:
    """Measures one cache, each time with a new prompt. ``folder``: where the files are that were
    written; None: there are no files.

    Where chunks are kept below RAM, the prompt of the time before is loaded, because the new one
    has taken its place in RAM.
    """

    def __init__(
        self, cache: Cache, kv: torch.Tensor, setting: Setting, folder: Path | None = None
    ) -> None:
        self._cache, self._kv, self._sizes, self._folder = cache, kv, setting.sizes, folder
        self._cpu = cpu_clock(setting.beside)
        self._draw = random.Random(1)
        self._blocks = list(range(self._sizes.blocks))
        self._draw.shuffle(self._blocks)
        self._before: Prompt | None = None
        self._known, self._unknown = (self._tokens(self._sizes.looked_up) for _ in range(2))

    def warm_up(self) -> dict[str, float]:
        """As :meth:`measured`, and what comes back must be what was saved. Raises WrongError."""
        if self._cache.looks_up:
            where = self._blocks * -(-self._sizes.looked_up // self._sizes.chunks)
            self._save(
                self._prompt(
                    self._known, where[: self._sizes.looked_up * self._sizes.blocks_per_chunk]
                )
            )
        if self._cache.keeps_below:
            self._before = self._new_prompt()
            self._save(self._before)
        meant = self._kv.clone()
        spoil = self._kv.view(torch.uint8).bitwise_not_
        if self._cache.keeps_below:
            spoil()  # the next prompt's bytes are others
        found = self.measured(before_load=spoil)
        if not torch.equal(self._kv.view(torch.uint8), meant.view(torch.uint8)):
            raise WrongError("the loaded bytes differ from those that were saved")
        for _ in range(_WARM_UPS):
            self.measured()
        return found

    def measured(self, before_load: Callable[[], object] = lambda: None) -> dict[str, float]:
        """The metrics: GB/s, CPU seconds a GiB, and milliseconds."""
        prompt = self._new_prompt()
        found = self._timed_save(prompt)
        before_load()
        load = self._before if self._cache.keeps_below and self._before is not None else prompt
        found |= self._timed_load(load)
        self._cache.forget(load)
        self._before = prompt
        return found | (self._look_ups() if self._cache.looks_up else {})

    # ---- bytes -----------------------------------------------------------------------------------

    def _timed_save(self, prompt: Prompt) -> dict[str, float]:
        begun, used = time.perf_counter(), self._cpu()
        seconds = {SAVE: self._save(prompt)}
        written, cpu = time.perf_counter() - begun, self._cpu() - used
        if self._cache.keeps_below:
            seconds[WRITE] = written
        if self._folder is not None:
            _flush(self._folder)
            seconds[DURABLE] = time.perf_counter() - begun
        return self._speeds(seconds) | {SAVE_CPU: cpu * GIB / self._sizes.prompt_bytes}

    def _save(self, prompt: Prompt) -> float:
        """Seconds that the calls took. It returns when all is in the place where it is kept."""
        begun = time.perf_counter()
        for start in range(0, len(prompt.tokens), self._sizes.step_tokens):
            self._cache.save(
                prompt, start, min(start + self._sizes.step_tokens, len(prompt.tokens))
            )
        took = time.perf_counter() - begun
        while not self._cache.settled():
            if time.perf_counter() > begun + PATIENCE_S:
                raise WrongError(f"what was saved is not all there after {PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        return took

    def _timed_load(self, prompt: Prompt) -> dict[str, float]:
        self._cache.announce(prompt)
        used, begun = self._cpu(), time.perf_counter()
        self._cache.load(prompt)
        took, cpu = time.perf_counter() - begun, self._cpu() - used
        return self._speeds({LOAD: took}) | {LOAD_CPU: cpu * GIB / self._sizes.prompt_bytes}

    def _speeds(self, seconds: dict[str, float]) -> dict[str, float]:
        return {metric: self._sizes.prompt_bytes / took / 1e9 for metric, took in seconds.items()}

    # ---- look-ups --------------------------------------------------------------------------------

    def _look_ups(self) -> dict[str, float]:
        found = dict[str, float]()
        for tokens, whole, match, held in (
            (self._known, HIT, MATCH_HIT, len(self._known)),
            (self._unknown, MISS, MATCH_MISS, 0),
        ):
            both = [self._look_up(tokens, held) for _ in range(self._sizes.look_ups)]
            found[whole] = _middle_ms(one for one, _ in both)
            alone = [one for _, one in both if one is not None]
            if alone:
                found[match] = _middle_ms(alone)
        return found

    def _look_up(self, tokens: Sequence[int], held: int) -> tuple[float, float | None]:
        begun = time.perf_counter()
        there, alone = self._cache.look_up(tokens)
        took = time.perf_counter() - begun
        self._cache.end_look_up()
        if there != held:
            raise WrongError(f"a look-up found {there:,} tokens, expected {held:,}")
        return took, alone

    # ---- prompts ---------------------------------------------------------------------------------

    def _new_prompt(self) -> Prompt:
        """A prompt with new tokens. Its blocks are scattered, as after some hours of an engine."""
        return self._prompt(self._tokens(self._sizes.chunks), self._blocks)

    def _prompt(self, tokens: Sequence[int], blocks: Sequence[int]) -> Prompt:
        step = self._sizes.block_tokens
        return Prompt(
            tokens, blocks, (torch.tensor(blocks).view(-1, 1) * step + torch.arange(step)).flatten()
        )

    def _tokens(self, chunks: int) -> list[int]:
        return [
            self._draw.randrange(1, _VOCABULARY) for _ in range(chunks * self._sizes.chunk_tokens)
        ]


def _flush(folder: Path) -> None:
    """Write out what the system and the disk still have of the files in their caches."""
    for file in (one for one in folder.rglob("*") if one.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _middle_ms(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return 1000 * ordered[len(ordered) // 2]


Opened = Callable[[Setting, torch.Tensor], AbstractContextManager[tuple[Cache, Path | None]]]


def serve(opened: Opened) -> None:
    """Be the arm's process until its input ends."""
    setting = Setting.of(sys.argv[1])
    torch.manual_seed(1)
    with _answers() as answer:
        kv = engine_kv(setting.sizes)
        with opened(setting, kv) as (cache, folder):
            turns = Turns(cache, kv, setting, folder)
            answer(turns.warm_up())
            for _ in sys.stdin:
                turns.measured()  # memory that lay idle between turns is slow at first
                answer(turns.measured())


@contextmanager
def _answers() -> Iterator[Callable[[Any], None]]:
    """How to answer: on the output that this process was given. Nothing else writes to it from now
    on."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        yield lambda said: print(json.dumps(said), file=out)
