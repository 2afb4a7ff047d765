"""vLLM connector: ``kv_connector="KVTierConnector"``, ``kv_connector_module_path="kvtier.connectors.vllm"``.

Importing this package does not import vLLM; the class is resolved when vLLM asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "KVTierConnector":
        from kvtier.connectors.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's ``vllm.general_plugins`` entry point: makes the bare name ``KVTierConnector`` known. Idempotent, as vLLM
    loads plug-ins once in every process but may be asked twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVTierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVTierConnector", "kvtier.connectors.vllm.connector", "KVTierConnector")
