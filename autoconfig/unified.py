"""Plans where the GPU has no memory of its own. Pure.

A RAM tier then takes from the engine's own KV cache, so it gets only the slots that loads need, and
what is kept for long is the disk's.
"""

from __future__ import annotations

from kvtier.autoconfig.breakeven import GPU_UTILIZATION
from kvtier.autoconfig.draft import Load, Plan
from kvtier.autoconfig.facts import Facts

_LESS = "--gpu-memory-utilization"
_MOST = 8
"""The tier takes at most this part (1/8) of the memory, unless one long context needs more."""


def slots_for_loads(facts: Facts, load: Load) -> int:
    """Bytes of a RAM tier through which hits can be loaded. A hit is promised when all of it is in
    RAM, and requests that wait claim half of RAM at most."""
    one = load.long_tokens * load.kv_bytes
    wanted = max(2 * one, load.longest * load.kv_bytes)
    total = facts.memory.total.value
    return max(one, min(wanted, total // _MOST // load.stores)) if total else 2 * one


def copies_to_come(facts: Facts) -> int:
    """Copies of the weights that loading will still take of the available RAM, in the engine's
    memory and on the way there."""
    started = bool(facts.engine.started.value)
    if facts.gpus.shared.value is not None:
        return 0 if started else 1
    return 1 if started and facts.gpus.count.value == 0 else 2


def show(facts: Facts, ram_bytes: int, load: Load, draft: Plan) -> None:
    """Explain the shared memory, vLLM's share of it beside the tier, and where chunks stay.
    Nothing where the GPU has memory of its own."""
    name, total = facts.gpus.shared, facts.memory.total.value
    if name.value is None:
        return
    why = "CPU and GPU share one memory: RAM keeps the slots that loads need, the disk the chunks"
    draft.show("unified_memory", name.value, name.source, why)
    if total and ram_bytes and not facts.engine.started.value:
        share = GPU_UTILIZATION - ram_bytes * load.stores / total
        what = f"vLLM's {_LESS}: its usual {GPU_UTILIZATION} less the RAM tier"
        draft.show(
            "gpu_memory_utilization", int(share * 100) / 100, facts.memory.total.source, what
        )
    if ram_bytes and not any(row.key == "nvme_path" for row in draft.settings):
        draft.warnings.append(
            "CPU and GPU share one memory and there is no disk tier: what leaves the RAM tier's "
            "slots is lost. Give a disk with --path"
        )
    if not ram_bytes:
        draft.warnings.append(
            f"CPU and GPU share one memory, and the engine has it: a lower {_LESS} leaves room for "
            "the slots that loads need"
        )
