"""How far a request is loaded and saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Of one request."""

    began: bool = False
    """A step has computed for it."""
    saved: int = 0
    """How many leading chunks were offered to the store with all their pieces."""
    states: list[tuple[int, int, int]] = field(default_factory=list)
    """``(group, block, tokens)`` of recurrent states that have blocks of their own and are not
    saved yet."""
    retried: bool = False
    """Its saves failed once, and were offered again."""
    blended: bool = False
    """Its blocks have KV from another place: nothing of it is saved any more."""
    sources: dict[str, int] = field(default_factory=dict)
    """How many tokens of the last load came from each place."""
    load_failed: bool = False
    """A load of it failed, so it is promised nothing any more."""

    def begin(self) -> None:
        """A step computes for it."""
        self.began = True

    def renamed(self) -> None:
        """Its chunks have other keys, so all that it has is offered."""
        self.saved = 0

    def moved(self) -> None:
        """It has other blocks than before, so all that they get is offered."""
        self.saved, self.states = 0, []

    def advance(self, chunks: int) -> None:
        """So many leading chunks are offered."""
        self.saved = max(chunks, self.saved)

    def wait_for(self, states: Sequence[tuple[int, int, int]]) -> None:
        """These states are to be saved, and no others."""
        self.states = [*states]

    def retry(self) -> None:
        """A save of it failed: all is offered once more."""
        if not self.retried:
            self.saved, self.retried = 0, True

    def load(self, sources: dict[str, int]) -> None:
        """Its blocks are loaded from these places. Empty: they are computed."""
        self.sources = sources

    def blend(self, sources: dict[str, int]) -> None:
        """It is loaded from other prompts: nothing of it is saved from now on."""
        self.blended, self.sources = True, sources

    def fail_load(self) -> None:
        """A load of it failed: it is promised nothing from now on."""
        self.load_failed = True
