"""Auto-config, the model and secrets, before any place for chunks is tried."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.autoconfig.explain import PLANNED
from kvtier.autoconfig.facts import Model, Serving
from kvtier.autoconfig.plan import LONG_CONTEXT_TOKENS, make_plan
from kvtier.autoconfig.start import probe_host
from kvtier.config.keys import Config
from kvtier.config.load import encryption_key, filled
from kvtier.core.fact import known
from kvtier.core.terminal import size_text
from kvtier.started import Started
from kvtier.tiers.seam import Finding, refused


def planned(config: Config, model: Model, *, server: bool = False) -> tuple[Config, Finding]:
    """Values that auto-config would set for an engine or a ``server``. The engine knows its own
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
    """Files with secrets are readable by this user alone, and encryption has what it needs."""
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
    """Why chunks that must be encrypted cannot be. "" when they can, or need not be."""
    return refused(lambda: started.encryption_key)
