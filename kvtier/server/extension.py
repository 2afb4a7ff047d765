"""The seam of what runs beside a server and is no part of it, kvtier's own and other packages'.

A package names a function in the entry point group ``kvtier.server_extensions``. It gets the
server's configuration before anybody is let in, and gives a :class:`ServerExtension`, or None where
nothing of it is configured::

    [project.entry-points."kvtier.server_extensions"]
    audit = "acme_audit:beside_server"
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvtier.core.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    from kvtier.server.server import Server

GROUP = "kvtier.server_extensions"
_OURS = {
    "engine_index": "kvtier.extensions.engine_index.index:beside_server",
    "event_stream": "kvtier.extensions.event_stream.publishing:beside_server",
}


class ServerExtension:
    def beside(self, server: Server) -> AbstractAsyncContextManager[None]:
        """Entered on the server's loop before engines are let in, left when the server has ended.
        Nothing in it may hold the loop for longer than a millisecond."""
        raise NotImplementedError


def server_extensions(config: Any) -> list[ServerExtension]:
    """Extensions that a configuration asks for. Raises ConfigError, also where a package's function
    fails."""
    points = [EntryPoint(name, where, GROUP) for name, where in _OURS.items()]
    points += sorted(entry_points(group=GROUP), key=lambda point: point.name)
    made = (_made(point, config) for point in points)
    return [extension for extension in made if extension is not None]


def _made(point: EntryPoint, config: Any) -> ServerExtension | None:
    try:
        extension: ServerExtension | None = point.load()(config)
    except KVTierError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the server's extension {point.name} ({point.value}) cannot be used: "
            f"{type(error).__name__}: {error}; repair or uninstall its package"
        ) from error
    return extension
