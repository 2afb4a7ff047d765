"""KVTier: the class that ``remote_storage_plugin.kvtier.class_name`` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter

from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError
from kvtier.extensions import cache_server
from kvtier.extensions.lmcache_remote.packing import HEAD_BYTES
from kvtier.extensions.lmcache_remote.remote import KVTierRemote

logger = logging.getLogger("kvtier.lmcache")

_KIND = "kvtier"
_LMCACHES = ("module_path", "class_name")


class KVTier(ConnectorAdapter):
    """LMCache's factory of connectors for plug-ins called ``kvtier`` or ``kvtier.<anything>``."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{_KIND}")

    def create_connector(self, context: Any) -> KVTierRemote:
        """Connect. LMCache logs a ConfigError and goes on without the connector."""
        config = settings(context.config.extra_config or {}, context.plugin_name or _KIND)
        _refuse(context.config)
        metadata = context.metadata
        own = fingerprint(_parts(metadata) | cache_server.tenant(config))
        chunk_bytes = sum(
            shape.numel() * dtype.itemsize
            for shape, dtype in zip(metadata.get_shapes(), metadata.get_dtypes(), strict=True)
        )
        layout = ChunkLayout(
            own, metadata.chunk_size, metadata.chunk_size, (HEAD_BYTES + chunk_bytes,)
        )
        server = cache_server.connect(config, layout)
        logger.info(
            "chunks of %d bytes at the kvtier server %s", chunk_bytes, config.server.address
        )
        return KVTierRemote(context, server, own, config.engine.load_timeout_ms / 1000)


def settings(extra: Mapping[str, Any], name: str) -> Config:
    """Return kvtier's configuration from LMCache's ``extra_config`` alone. Raises ConfigError."""
    prefix = f"remote_storage_plugin.{name}."
    given = {
        key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)
    }
    flags = {key: value for key, value in given.items() if key not in _LMCACHES}
    return cache_server.settings(flags, prefix, "extra_config")


def _refuse(config: Any) -> None:
    """Raise ConfigError for settings of LMCache that kvtier does not support."""
    if config.use_layerwise:
        raise ConfigError("use_layerwise=true: kvtier keeps chunks of all layers; set it to false")
    if config.remote_serde not in {None, "naive"}:
        raise ConfigError(
            f"remote_serde={config.remote_serde}: kvtier keeps KV as it is; set it to naive"
        )


def _parts(metadata: Any) -> dict[str, Any]:
    """Return the fingerprint's parts. LMCache's keys do not contain the shape of a whole chunk."""
    return {
        "lmcache": 1,
        "model": metadata.model_name,
        "world_size": metadata.world_size,
        "chunk_tokens": metadata.chunk_size,
        "shapes": [[*shape] for shape in metadata.get_shapes()],
        "dtypes": [str(dtype) for dtype in metadata.get_dtypes()],
        "mla": bool(metadata.use_mla),
    }
