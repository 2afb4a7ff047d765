"""Versions of vLLM that kvtier supports, and everything that differs between them. Importing this
module does not import vLLM.

With a vLLM that is too old, every way to use kvtier ends with the message of :func:`verdict`. With
a supported one, a feature whose hook this vLLM lacks is off, and :func:`limits` says so."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from kvtier.core.errors import ConfigError
from kvtier.core.lookup import RAM
from kvtier.tiers.registry import TIERS
from kvtier.tiers.seam import TierSection

OLDEST = (0, 23)
TESTED = ("0.23.0", "0.29.0", "0.32.0", "0.33.0")
ASKS_SCHEDULER = (0, 29)
"""Oldest vLLM known to ask the scheduler's half for statistics when no worker gave some."""

_NAME = "kvtier"
LOAD_RESULTS = "get_transfer_results"
"""Hook that names requests whose load failed. Without it a failed load is told by its block ids."""
_LIMITS = {
    "has_pending_push_work": (
        "what the last step before a pause saved on a GPU can be hit from the next step on"
    ),
    "get_external_cache_hit_sources": "vLLM's metrics do not split hits by source",
}
"""Hook of vLLM's connectors -> what is limited where vLLM has no such hook."""


def verdict(version: str) -> str:
    """Return a log line about this version of vLLM. Raises ConfigError when it is too old."""
    tested = ", ".join(TESTED)
    if _is_before(version, OLDEST):
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"vLLM {version} is too old: kvtier needs {oldest} or newer ({tested} tested; LMI has "
            "it from v27 on)"
        )
    known = any(version.startswith(one.rpartition(".")[0] + ".") for one in TESTED)
    return f"vLLM {version}" + ("" if known else f" (not tested; {tested} are)")


def require() -> str:
    return verdict(running())


def mode(vllm_config: Any) -> str:
    runner = getattr(vllm_config, "use_v2_model_runner", None)
    named = "" if runner is None else f"Model Runner {'V2' if runner else 'V1'}, "
    ahead = vllm_config.scheduler_config.async_scheduling
    return f"{named}{'async' if ahead else 'synchronous'} scheduling"


def running() -> str:
    import vllm

    return getattr(vllm, "__version__", None) or "of unknown version"


def _is_before(version: str, other: tuple[int, int]) -> bool:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return len(numbers) == 2 and numbers < other


def workers_tell_first(version: str) -> bool:
    """Return whether vLLM asks the scheduler's half for statistics only after a worker's."""
    return _is_before(version, ASKS_SCHEDULER)


def keeps_groups(base: type) -> bool:
    """Return whether other groups than one of full attention can be kept: vLLM must tell connectors
    each request's blocks by group at each step, and survive a load that fails there."""
    from vllm.v1.core.sched import output

    return hasattr(output, "KVConnectorBlockState") and hasattr(base, LOAD_RESULTS)


def groups_base(base: type) -> type:
    """Return the base of a connector with all groups, for which vLLM makes small blocks."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as connectors

    found: type = connectors.SupportsHMA if keeps_groups(base) else object
    return found


def in_flight_tokens(vllm_config: Any) -> int:
    """Return the most tokens of the steps in flight, until whose end vLLM keeps a window's blocks.
    A vLLM that does not say it keeps full attention alone, which needs no fewer blocks."""
    in_one_step = vllm_config.scheduler_config.max_num_batched_tokens
    return int(getattr(vllm_config, "max_in_flight_tokens", in_one_step))


def limits(base: type) -> list[str]:
    return [
        f"this vLLM has no {hook}: {limit}"
        for hook, limit in _LIMITS.items()
        if not hasattr(base, hook)
    ]


def hit_sources(tokens: Mapping[str, int]) -> dict[Any, int]:
    """Return tokens by vLLM's own kinds of sources, from those by kvtier's places."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    result = Counter[Any]()
    for place, count in tokens.items():
        section = TIERS[place].section if place in TIERS else TierSection
        result[CacheHitSource["HOST" if place == RAM else section.medium]] += count
    return result


class _Named(logging.Handler):
    """Handler that puts kvtier's name before texts: vLLM's format has only a file's name."""

    def __init__(self, handlers: Iterable[logging.Handler]) -> None:
        super().__init__()
        self.handlers = tuple(handlers)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith(_NAME):
            record = copy(record)
            record.msg, record.args = f"{_NAME}: {text}", ()
        own = logging.getLogger(_NAME).handlers  # they get the record themselves
        for handler in self.handlers:
            if record.levelno >= handler.level and handler not in own:
                handler.handle(record)


def log_like_vllm(level: str) -> None:
    """Send kvtier's log lines to where vLLM's go, in its format, once a process."""
    ours = logging.getLogger(_NAME)
    ours.setLevel(level)
    theirs = logging.getLogger("vllm").handlers
    if theirs and not ours.handlers:
        ours.handlers, ours.propagate = [_Named(theirs)], False


def set_failure_policy(vllm_config: Any) -> None:
    """Make vLLM compute a request whose cached KV cannot be loaded: vLLM takes its blocks back and
    starts the request again. kvtier loads into blocks of requests that wait, so nothing has been
    planned or computed over them. vLLM's own default ends such a request with an error."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logging.getLogger("kvtier.connectors.vllm").debug(
            "kv_load_failure_policy=recompute: it is right in every mode"
        )
