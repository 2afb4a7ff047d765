"""Auto-config, the model and secrets, then trials of every configured place for chunks
between two processes, with deadlines and no lasting change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from kvtier import selftest
from kvtier.autoconfig.explain import PLANNED
from kvtier.autoconfig.facts import Model, Serving
from kvtier.autoconfig.plan import LONG_CONTEXT_TOKENS, make_plan
from kvtier.autoconfig.start import probe_host
from kvtier.client.client import Client
from kvtier.client.connect import Address
from kvtier.config.keys import Config
from kvtier.config.load import encryption_key, filled
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.fact import known
from kvtier.core.terminal import size_text
from kvtier.started import Started
from kvtier.store.reports.zero_hits import ZeroHits, totals
from kvtier.tiers.nvme.disks import left_behind, probe_disks
from kvtier.tiers.registry import RegisteredTier
from kvtier.tiers.seam import Finding, TierSection, refused


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
