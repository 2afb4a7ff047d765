"""One arm of :mod:`kvtier.bench.compare.alone` in a process of its own: what it is asked to do,
timed.

The same for every cache, so that none is measured in another way. The process is given its
:class:`Setting` as its only argument, measures once to warm up (and compares every byte that it
loads), and then once for every line it reads; each time it prints one line of JSON, metric ->
value. Imported in peers' environments too.
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
"""After these every place has the memory it needs: pages that are touched for the first time cost
seconds a GiB."""
_POLL_S = 0.0005
PATIENCE_S = 60.0


class WrongError(Exception):
    """A cache did not do what it is measured for; its numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine's KV: bf16, as vLLM's CPU backend lays it out. ``chunks`` of a prompt that is
    saved and loaded, ``looked_up`` of one that is looked up, so often; ``step_tokens``: the engine
    saves after each step of so many."""

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
    """``place`` is the arm's own word for where it keeps chunks, ``at`` that place's folder or
    address. ``beside``: process whose CPU time is the arm's too."""

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
    """Where the engine keeps its KV: an id a block, and a slot a token."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    slots: torch.Tensor


class Cache(Protocol):
    """What is measured. Every method raises :class:`WrongError` when less comes of it than was
    asked for."""

    keeps_below: bool
    """Chunks lie in a tier below RAM, and loads come from there."""
    looks_up: bool

    def save(self, prompt: Prompt, start: int, end: int) -> None:
        """Tokens ``start`` to ``end`` of it, which a step of the engine has computed; the others
        were saved before."""
        ...

    def settled(self) -> bool:
        """Whether everything that was saved lies where it is kept."""
        ...

    def announce(self, prompt: Prompt) -> None:
        """It will be loaded: what an engine asks before, where that saves the load something; not
        measured."""
        ...

    def load(self, prompt: Prompt) -> None:
        """All of it, into its blocks; where ``keeps_below``, from there and from nowhere else."""
        ...

    def forget(self, prompt: Prompt) -> None:
        """Make room: not measured."""
        ...

    def look_up(self, tokens: Sequence[int]) -> tuple[float, float | None]:
        """Tokens of it that are held; the seconds of the match alone, where it can be had apart."""
        ...

    def end_look_up(self) -> None:
        """Let go of what the look-up pinned: not measured."""
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
    """Measures one cache, each time with a new prompt. ``folder``: whose files are what was
    written; None: no files.

    Where chunks are kept below RAM, the prompt of the time before is loaded: the new one has taken
        its place in RAM.
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
        """As :meth:`measured`, and what comes back is what was saved. Raises WrongError."""
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
        """Metric -> GB/s, CPU seconds a GiB, milliseconds."""
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
        """Seconds that the calls took; returns when all of it lies where it is kept."""
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
        """Nobody has seen its tokens. Its blocks lie about, as after some hours of an engine."""
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
    """What the disk itself still has in its cache, and what the system knows of the files."""
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
    """Be the arm's process: until its input ends."""
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
    """How to answer: by the output that this process was given, which nobody else writes to from
    here on."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        yield lambda said: print(json.dumps(said), file=out)
