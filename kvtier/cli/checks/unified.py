"""What vLLM has to be told where CPU and GPU share one memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.cli.vllm_command import ALLOCATOR, CUMEM, EXPANDABLE, has_own_allocator
from kvtier.core.fact import Fact
from kvtier.tiers.finding import Finding

_TOLD = f"{ALLOCATOR}={EXPANDABLE}"
SETTINGS = f"{CUMEM} and {_TOLD}"
_VARIABLES = (ALLOCATOR, "PYTORCH_ALLOC_CONF")


def check_memory(shared: Fact[str]) -> Finding:
    """``shared``: the machine's name (:func:`kvtier.autoconfig.probe.unified.shared_memory`)."""
    seen = f"CPU and GPU share one: {shared.value} ({shared.source})"
    return Finding("memory", "ok", f"{seen}; a RAM tier takes what the engine could have")


def allocator(arguments: Sequence[str], env: Mapping[str, str], shared: Fact[str]) -> str:
    """What vLLM's command lacks, and why. Empty where the GPU has memory of its own or is AMD's,
    and where torch's allocator is told already."""
    name = shared.value
    if name is None or name.startswith("AMD"):
        return ""
    if any(EXPANDABLE in env.get(variable, "") for variable in _VARIABLES):
        return ""
    lacks = _TOLD if has_own_allocator(arguments) else SETTINGS
    return (
        f"CPU and GPU share one memory ({name}) and {lacks} is not set: torch keeps what long "
        "prompts took, until the host has none left"
    )


def check_allocator(lacks: str) -> Finding:
    do = f"start vLLM with {SETTINGS}: beside a connector it takes the second only with the first"
    return Finding("allocator", "warn", lacks, do)
