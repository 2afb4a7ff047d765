"""A kvtier server as a secondary tier under vLLM's own OffloadingConnector.

One entry of ``secondary_tiers`` in ``kv_connector_extra_config``:

.. code-block:: json

    {"type": "KVTierTier", "module_path": "kvtier.connectors.vllm_tier",
     "server": "unix:///run/kvtier/kvtier.sock"}

README.md in this folder says the rest. vLLM's interface for such tiers is young: another release
has other names in it. So a vLLM that was not tested is refused, in words.
"""

from __future__ import annotations

from kvtier.connectors.vllm.versions import running
from kvtier.core.errors import ConfigError

TESTED = ("0.32", "0.33")
"""Between them only what this tier does not use differs: 0.33 may poll a tier from another thread
where the tier says so (this one does not), and asks for labels of an info metric (it has none)."""


def tier_class() -> type:
    """The class behind the entry. Raises ConfigError for a vLLM that was not tested."""
    version = running()
    if not version.startswith(tuple(f"{one}." for one in TESTED)):
        raise ConfigError(
            f"vLLM {version}: KVTierTier is tested with {' and '.join(TESTED)}, and vLLM changes "
            "the interface of secondary tiers from release to release. Use one of these, or "
            "kvtier's own connector (KVTierConnector), which takes more of them"
        )
    from kvtier.extensions.vllm_tier.tier import KVTierTier

    return KVTierTier
