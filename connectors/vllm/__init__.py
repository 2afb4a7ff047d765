"""vLLM connector: ``kv_connector="KVTierConnector"``,
``kv_connector_module_path="kvtier.connectors.vllm"``.

Importing this package does not import vLLM. The class is resolved only when vLLM asks for it,
through its plug-ins or through the module path, and only where vLLM is new enough.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtier.config.keys import replaces_lmcache
from kvtier.connectors.vllm import versions

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KVTierConnector

__all__ = ["CONNECTOR", "LMCACHE", "KVTierConnector", "register"]

CONNECTOR = "KVTierConnector"
LMCACHE = "LMCacheConnectorV1"
"""LMCache's connector, which kvtier replaces where ``KVTIER_REPLACE_LMCACHE`` says so."""

# Under vLLM's own logger, because kvtier's loggers are not set up yet when plug-ins are loaded.
logger = logging.getLogger("vllm.kvtier")


def __getattr__(name: str) -> Any:
    if name == CONNECTOR:
        versions.require()
        from kvtier.connectors.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's ``vllm.general_plugins`` entry point: makes the bare name ``KVTierConnector`` known.
    Where the operator said so, it also makes ``LMCacheConnectorV1`` mean kvtier.

    It is idempotent, because vLLM loads plug-ins once in every process but may be asked twice. On a
    vLLM that is too old the names are known too, and refuse when they are asked for. So an engine
    that does not ask for kvtier runs. Raises ConfigError when the operator's value is no flag.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = KVConnectorFactory._registry
    if CONNECTOR not in known:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)
    if replaces_lmcache() and known.get(LMCACHE) is not known[CONNECTOR]:
        known[LMCACHE] = known[CONNECTOR]
        logger.info("KVTIER_REPLACE_LMCACHE is on: kv_connector %s is served by kvtier", LMCACHE)
