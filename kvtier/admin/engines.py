"""What the admin interface asks of engines whose KV events are followed."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from kvtier.admin.forms import EngineLookup
from kvtier.admin.status import EngineStatus


class EngineIndex:
    """This one follows no engine. One that does overrides every method. The server's loop calls
    them."""

    def following(self, trouble: MutableMapping[str, str]) -> AbstractAsyncContextManager[None]:
        """Follows the engines for as long as the context lasts. ``trouble`` is told, by subject,
        which engine cannot be followed."""
        return nullcontext()

    def status(self) -> list[EngineStatus]:
        """One row for each engine, in the order of the configuration."""
        return []

    async def lookup(self, tokens: Sequence[int], salt: str | None) -> list[EngineLookup]:
        """How much of a prompt each engine has, in the order of the configuration."""
        return []
