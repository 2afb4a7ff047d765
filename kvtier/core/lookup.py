"""Lookup: how much of a prompt's prefix a Store or a Client can give, when, and from which place.
Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from kvtier.core.chunk import ChunkKey

RAM = "ram"
REMOTE = "remote"
"""Name of the tier that is a server on another host."""
RAM_PLACE = 0
"""Place number of RAM. Tier ``index`` is place ``1 + index``."""


class Change(NamedTuple):
    """Change of a chunk: it can be served from a place from now on (``there``), or not any more."""

    place: int
    key: ChunkKey
    there: bool


class Asker(NamedTuple):
    session: str = ""
    """Name of its conversation. Without a name the chunks tell it."""
    tokens: int = 0
    """Length of its prompt, or 0 if it is not said."""
    again: bool = False
    """Whether the request has asked before: then this is no new prompt."""
    request: int = 0
    """Number by which :class:`Ended` will name the request, or 0 if no Ended follows."""
    owner: int = 0
    """Tenant and model of the request, on a server: :mod:`kvtier.core.tenant`."""


ANONYMOUS = Asker()
Stop = Literal["stop", "length", "abort", "error", "repetition", "other"]
STOPS: tuple[Stop, ...] = get_args(Stop)


class Ended(NamedTuple):
    request: int
    tokens: int
    """Length of its answer."""
    stop: Stop


class Progress(NamedTuple):
    """Chunks of a run: ``ready`` now, and ``coming`` after those if nothing fails."""

    ready: int
    coming: int


class Asking(NamedTuple):
    """Question that a shared tier could be asked for the unknown rest of a run."""

    answer_s: float | None
    """Seconds until it has answered, or None if unknown."""
    arrive_s: float | None
    """Seconds until all of the rest is in RAM, if the tier has it."""
    odds: float
    """Probability that the tier has it, from 0 to 1."""


class LookupResult(NamedTuple):
    steps: Sequence[tuple[int, float | None]]
    """Pairs of leading chunks and seconds from claiming them until they are in RAM (None: unknown).
    The first is what is in RAM now, in 0 seconds, and the last all that is known of the run."""
    asking: Asking | None = None
    why: str = ""
    """Reason why the run goes no further, see :mod:`kvtier.store.reports.miss_reasons`. Empty if
    all of it is there, or no answer came."""

    @property
    def ready(self) -> int:
        return self.steps[0][0]

    @property
    def known(self) -> int:
        return self.steps[-1][0]

    @property
    def coming(self) -> int:
        """Chunks after the ready ones that a lower tier has, or that are being promoted."""
        return self.known - self.ready

    @property
    def progress(self) -> Progress:
        return Progress(self.ready, self.coming)


class Served(NamedTuple):
    """Outcome of one prompt, in tokens of whole chunks that the engine did not have itself."""

    asked: int
    hits: Mapping[str, int]
    """Tokens that are loaded, by the place they come from: ``ram`` or a tier's name."""
    rest: Sequence[ChunkKey] = ()
    """Chunks that are not loaded, or not whole."""
    chunk_tokens: int = 1
    end: int = 0
    """Tokens of the prompt that are not computed: the engine has them, or they are loaded. They may
    end inside the first chunk of ``rest``."""

    @property
    def begin(self) -> int:
        """Tokens of the prompt that the engine has itself, before the first hit."""
        return max(0, self.end - sum(self.hits.values()))


NO_LOOKUP = LookupResult([(0, 0.0)])
