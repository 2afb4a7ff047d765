"""vLLM connector: ``kv_connector="KVTierConnector"``,
``kv_connector_module_path="kvtier.connectors.vllm"``.

Importing this package does not import vLLM. The class is resolved only when vLLM asks for it,
through its plug-ins or through the module path, and only where vLLM is new enough.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtier.config.load import replaces_lmcache
from kvtier.connectors.vllm import versions

CONNECTOR = "KVTierConnector"
LMCACHE = "LMCacheConnectorV1"
"""LMCache's connector, which kvtier replaces where ``KVTIER_REPLACE_LMCACHE`` says so."""

LOAD_EVERY_HIT = "load_every_hit"
"""Key of ``kv_connector_extra_config`` for benchmarks and tests. With ``True`` every hit is loaded,
even where computing it would be sooner."""
EXTENSIONS = "extensions"
"""Key of ``kv_connector_extra_config`` with other packages' extensions
(:mod:`.extensions.installed`)."""

# Under vLLM's own logger: kvtier's loggers are not set up yet when plug-ins are loaded.
logger = logging.getLogger("vllm.kvtier")


def __getattr__(name: str) -> Any:
    if name == CONNECTOR:
        versions.require()
        from kvtier.connectors.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def settings(transfer: Any) -> dict[str, Any]:
    given = getattr(transfer, "kv_connector_extra_config", None) or {}
    return {key: value for key, value in given.items() if key not in (LOAD_EVERY_HIT, EXTENSIONS)}


def register() -> None:
    """vLLM's ``vllm.general_plugins`` entry point, perhaps called twice: makes the bare name
    ``KVTierConnector`` known and, where the operator said so, ``LMCacheConnectorV1`` mean kvtier.

    On a vLLM that is too old the names refuse only when they are asked for, so that an engine
    without kvtier runs. Raises ConfigError when the operator's value is not a flag."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = KVConnectorFactory._registry
    if CONNECTOR not in known:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)
    if replaces_lmcache() and known.get(LMCACHE) is not known[CONNECTOR]:
        known[LMCACHE] = known[CONNECTOR]
        logger.info("KVTIER_REPLACE_LMCACHE is on: kv_connector %s is served by kvtier", LMCACHE)
