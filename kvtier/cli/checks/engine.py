"""vLLM in this Python, and the command that starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from kvtier.autoconfig.probe.gpus import shared_memory
from kvtier.cli import sglang_command, vllm_command
from kvtier.cli.checks.installed import look, verdict
from kvtier.config.load import REPLACE_LMCACHE, replaces_lmcache
from kvtier.connectors.vllm import CONNECTOR, LMCACHE
from kvtier.core import processes
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact
from kvtier.core.processes import environment
from kvtier.tiers.seam import Finding

_LOAD_TIMEOUT_S = 120
_LOAD = f"""
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
known = KVConnectorFactory._registry
import kvtier.connectors.vllm as ours
ours.{CONNECTOR}
print(json.dumps(["{CONNECTOR}" in known, known.get("{LMCACHE}") is known.get("{CONNECTOR}")]))
"""


def check_engine() -> Iterator[Finding]:
    """Check vLLM in this Python, and whether the connector loads there as vLLM would load it."""
    env = environment()
    try:
        text = verdict(look(sys.executable, env), sys.executable)
    except ConfigError as error:
        yield Finding("vllm", "fail", str(error), "run doctor with the Python that runs vLLM")
        return
    tested = "not tested" not in text
    yield Finding(
        "vllm", "ok" if tested else "warn", text, "" if tested else "read the release notes of both"
    )
    yield _connector(env)


def _connector(env: dict[str, str]) -> Finding:
    command = processes.python(sys.executable, "-c", _LOAD)
    env = processes.without_settings(env, REPLACE_LMCACHE)
    try:
        done = processes.run(
            command, env, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        seen = f"not loaded within {_LOAD_TIMEOUT_S} s"
        return Finding("connector", "fail", seen, "import vllm by hand and see why")
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:] or [""]
    loaded: list[bool] = []
    with suppress(ValueError):
        loaded = json.loads(last[0]) if done.returncode == 0 else []
    if not loaded:
        seen = f"{CONNECTOR} does not load: {last[0]}"
        do = "run doctor with the Python that runs vLLM; install kvtier's wheel (make wheel) there"
        return Finding("connector", "fail", seen, do)
    known, instead = loaded
    if replaces_lmcache() and not instead:
        seen = (
            f"KVTIER_REPLACE_LMCACHE is on, but vLLM loads no plug-in of kvtier's: {LMCACHE} is "
            "LMCache's"
        )
        return Finding("connector", "fail", seen, "unset VLLM_PLUGINS, or add kvtier to it")
    if not known:
        do = 'unset VLLM_PLUGINS, or name "kv_connector_module_path":"kvtier.connectors.vllm"'
        return Finding(
            "connector", "warn", f"{CONNECTOR} loads, but vLLM does not know its bare name", do
        )
    return Finding(
        "connector", "ok", f"vLLM loads {CONNECTOR}" + (f", also for {LMCACHE}" if instead else "")
    )


def check_command(words: Sequence[str]) -> Iterator[Finding]:
    """Check that LMI's options and the command keep kvtier's connector, or storage for SGLang."""
    env, vllm = environment(), list(words[1:] if words[:1] == ["--"] else words)
    try:
        vllm_command.refuse_own_offloading(env)
        if not vllm:
            return
        if sglang_command.is_sglang(vllm):
            sglang_command.refuse(vllm)
            yield Finding("command", "ok", sglang_command.verdict(vllm, env))
            return
        arguments = vllm_command.understood(vllm, env.get("PATH")).arguments
        said = vllm_command.transfer(arguments, replaces_lmcache(env))
        vllm_command.refuse_expandable_segments(arguments, env)
    except ConfigError as error:
        do = "start the engine with kvtier launch, which looks at it first"
        yield Finding("command", "fail", str(error), do)
        return
    if vllm_command.recomputing(vllm) == vllm:
        yield Finding("command", "ok", "; ".join(said))
    else:
        do = "start it with kvtier launch, or say so beside kv_connector"
        yield Finding("command", "warn", "; ".join(said), do)
    if lacks := allocator(arguments, env, shared_memory()):
        why = "beside a connector it takes the second only with the first"
        do = f"start vLLM with {SETTINGS}: {why}"
        yield Finding("allocator", "warn", lacks, do)


_TOLD = f"{vllm_command.ALLOCATOR}={vllm_command.EXPANDABLE}"
SETTINGS = f"{vllm_command.CUMEM} and {_TOLD}"
_VARIABLES = (vllm_command.ALLOCATOR, "PYTORCH_ALLOC_CONF")


def allocator(arguments: Sequence[str], env: Mapping[str, str], shared: Fact[str]) -> str:
    """Return the arguments that vLLM's command lacks, and why. Empty if the GPU has its own memory
    or is AMD's, or torch's allocator is told already."""
    name = shared.value
    if name is None or name.startswith("AMD"):
        return ""
    if any(vllm_command.EXPANDABLE in env.get(variable, "") for variable in _VARIABLES):
        return ""
    lacks = _TOLD if vllm_command.has_own_allocator(arguments) else SETTINGS
    return (
        f"CPU and GPU share one memory ({name}) and {lacks} is not set: torch keeps what long "
        "prompts took, until the host has none left"
    )
