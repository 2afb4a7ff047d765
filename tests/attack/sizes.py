"""The door of chunk sizes: a client that greets with one size after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from msgspec import structs

from kvtier.client.connect import ServerAccess, enter
from kvtier.core.errors import KVTierError

_MOST_GREETINGS = 64
_WELCOME_S = 10.0


def greetings(access: ServerAccess, sizes: Sequence[int]) -> list[int]:
    """Greet with chunks of each of these sizes, and leave at once. At most 64 are tried. Returns
    the sizes that the server welcomed."""
    welcomed = []
    for size in sizes[:_MOST_GREETINGS]:
        with suppress(KVTierError, OSError):
            one = enter(of_size(access, size), _WELCOME_S)
            one.socket.close()
            welcomed.append(size)
    return welcomed


def of_size(access: ServerAccess, size: int) -> ServerAccess:
    """The same client, with chunks of this size."""
    return replace(access, hello=structs.replace(access.hello, chunk_bytes=size))
