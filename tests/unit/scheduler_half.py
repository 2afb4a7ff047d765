"""The scheduler's half without a connector."""


def scheduler_half(store, layout, geometry, parts, load_policy, **duty):
    """``parts``: where each rank's parts of a slot lie. It has the extensions that every engine
    has."""
    from kvtier.connectors.vllm.extension import Duty, Tools
    from kvtier.connectors.vllm.extensions.installed import HintDelivery
    from kvtier.connectors.vllm.extensions.outcomes import Misses
    from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads
    from kvtier.connectors.vllm.scheduler_side.jobs import Jobs
    from kvtier.connectors.vllm.scheduler_side.scheduler import SchedulerHalf
    from kvtier.extensions.spans.engine import Able, Spans

    tools = Tools(store, layout, geometry, Jobs(parts, load_policy.clock), load_policy)
    misses, does, hints = Misses(tools), Duty(**duty), HintDelivery(store, geometry)
    return SchedulerHalf(
        tools, does, (Spans(tools, Able()), misses, hints, EarlyLoads(tools, does))
    )


def extension(half, kind):
    """The one of this class that a half has."""
    (found,) = (each for each in half.extensions if isinstance(each, kind))
    return found
