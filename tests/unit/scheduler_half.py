"""The scheduler's half without a connector."""

from __future__ import annotations

from typing import Any


def scheduler_half(
    store: Any, layout: Any, geometry: Any, parts: Any, load_policy: Any, **duty: Any
) -> Any:
    """``parts``: where each rank's parts of a slot lie. It has the extensions that every engine
    has."""
    from kvtier.connectors.vllm.extension import Tools
    from kvtier.connectors.vllm.extensions.shipped import of_every_engine
    from kvtier.connectors.vllm.extensions.spans import Able
    from kvtier.connectors.vllm.scheduler_side.jobs import Jobs
    from kvtier.connectors.vllm.scheduler_side.scheduler import Duty, SchedulerHalf

    tools = Tools(store, layout, geometry, Jobs(parts, load_policy.clock), load_policy)
    return SchedulerHalf(tools, Duty(**duty), of_every_engine(tools, Able()))


def extension(half: Any, kind: Any) -> Any:
    """The one of this class that a half has."""
    (found,) = (each for each in half.extensions if isinstance(each, kind))
    return found
