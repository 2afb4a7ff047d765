"""Sessions of a server whose questions a test answers all at once."""

from __future__ import annotations

from kvtier.core.steps import whole
from kvtier.extensions.event_stream.announced import Announced
from kvtier.protocol import wire
from kvtier.server import session
from kvtier.server.registry import SizeClass
from kvtier.server.shares import ScanLimiter, Shares
from kvtier.store.store import Store


class Session(session.Session):
    """It shares ``shares`` and ``pace`` with nobody, unless they are given."""

    def __init__(
        self,
        store: Store,
        owner: int,
        shares: Shares | None = None,
        pace: ScanLimiter | None = None,
        announced: Announced | None = None,
    ) -> None:
        size_class = SizeClass(store, lambda call: call())
        size_class.shares = shares or size_class.shares
        size_class.pace = pace or size_class.pace
        super().__init__(size_class, owner, announced)

    def answer(self, question: wire.Question) -> wire.Answer | None:
        return whole(self.begin(question))

    def end(self) -> None:
        whole(self.ending())
