"""Extensions of the scheduler's half: a hook for everything that happens to a request there.

An :class:`Extension` overrides the hooks that it needs. The scheduler's half
tells each of its extensions everything that it has a hook for, and never asks whether one is there.

vLLM's scheduling loop calls the hooks, on one thread. An engine computes nothing meanwhile, so a
hook waits for nothing. What it keeps is bounded, or belongs to a request and goes with it:
:attr:`~kvtier.connectors.vllm.scheduler_side.prompts.Prompt.notes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.api import KVStore
from kvtier.connectors.vllm.groups import Geometry, Piece
from kvtier.connectors.vllm.scheduler_side.due_steps import Running
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Jobs, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.load_policy.decide import LoadPolicy

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import RankLayout, StepMetadata, StepReport


class Duty(NamedTuple):
    loads: bool = True
    saves: bool = True
    save_decode: bool = True
    answer_tokens: int = 1
    """Most tokens of an answer that one step computes: one, and drafts."""
    shares_blocks: bool = True
    """Whether vLLM's own prefix cache is on: what one request has loaded is there for others."""
    blocks: int | None = None
    """Number of the engine's blocks, None for so many that it does not matter."""
    in_flight: int = 0
    """Most tokens that the steps in flight compute."""
    steps_alone: bool = False
    """Whether no other rank of data parallelism waits for this engine's steps."""
    hit_unit: int = 0
    """Unit in tokens of the ends that hits may have within a block. 0: they end with blocks."""
    in_parts: bool = False
    """Whether vLLM keeps the blocks that had arrived of a load that was cut."""


class Tools(NamedTuple):
    store: KVStore
    layout: ChunkLayout
    """Maker of chunks' keys, as long as the model has its first weights."""
    geometry: Geometry
    jobs: Jobs
    load_policy: LoadPolicy
    """Policy with the clock, in monotonic seconds."""


class EngineFacts(NamedTuple):
    duty: Duty
    vllm_config: Any
    kv_cache_config: Any
    ranks: Sequence[RankLayout]
    spans: bool


class Live(NamedTuple):
    """Parts of the scheduler's half that extensions which load share."""

    prompts: Mapping[str, Prompt]
    running: Running
    answer: Callable[[Prompt, Sequence[str], int], None]
    """Function that tells all extensions and the store what came of a request: see
    :meth:`Extension.answered`."""


class Extension:
    """Base of all extensions. A request's hooks come in this order."""

    def join(self, live: Live) -> None:
        """Keep ``live``. The scheduler's half is made, and has told nothing yet."""

    # ---- a request -------------------------------------------------------------------------------

    def new(self, request: Any, named: Callable[[Any], Prompt]) -> None:
        """A request came, before vLLM asks any cache for it. ``named`` makes its record early."""

    def asked(self, prompt: Prompt, keys: Sequence[ChunkKey]) -> None:
        """vLLM asks for a hit, perhaps again. ``keys``: those of the request's whole chunks."""

    def promise(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, *, busy: bool
    ) -> int | None:
        """Return the tokens beyond the first ``computed`` that the extension can load. None lets
        vLLM ask again. 0 leaves it to the next one, or the store. ``busy``: others are computed."""
        return 0

    def allocated(self, prompt: Prompt, blocks: Any, tokens: int) -> bool:
        """Promised ``tokens`` are to be loaded into the blocks. Returns whether it loads them."""
        return False

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        """vLLM has taken the store's answer: ``tokens`` are loaded, each piece from its place in
        ``places``. The prompt's record says what was declined and why no more is there."""

    def saving(
        self, prompt: Prompt, saved: int, computed: int, pieces: Mapping[ChunkKey, Piece]
    ) -> None:
        """The store takes ``pieces`` of the chunks from number ``saved`` up to ``computed``."""

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        """All ranks have reported a load or a save. ``last_of``: requests without another job."""

    def drop(self, prompt: Prompt) -> None:
        """Give back what the extension has claimed for the request."""

    def finished(self, prompt: Prompt, *, saving: bool) -> dict[str, Any] | None:
        """The request has ended, after :meth:`drop`. ``saving``: a job is under way, and
        :meth:`ended` comes. Returns the ``kv_transfer_params`` of the answer."""

    # ---- an engine -------------------------------------------------------------------------------

    def step(self, metadata: StepMetadata, loads: Sequence[BegunLoad]) -> None:
        """A step is planned. ``metadata`` goes to the workers, with these loads among its jobs."""

    def report(self, report: StepReport) -> None:
        """All ranks have reported a step."""

    @property
    def waits(self) -> bool:
        """Whether the engine has to take steps even with nothing to compute."""
        return False

    def counts(self) -> dict[str, int]:
        """Counts since the last call, for vLLM's metrics."""
        return {}

    def events(self) -> list[Any]:
        """Events since the last call, for vLLM's event stream."""
        return []


def overridden(extensions: Sequence[Extension]) -> dict[str, list[Callable[..., Any]]]:
    """Return each hook of the extensions that override it, in their order."""
    names = [name for name, hook in vars(Extension).items() if callable(hook) and name[0] != "_"]
    return {
        name: [
            getattr(each, name)
            for each in extensions
            if getattr(type(each), name) is not getattr(Extension, name)
        ]
        for name in names
    }
