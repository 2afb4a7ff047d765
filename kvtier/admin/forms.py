"""Forms that the admin surface is asked and answers with, and its routes."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from kvtier.core.chunk import KEY_BYTES
from kvtier.eviction.hints import LONGEST_KEEP_S

MAX_BODY_BYTES = 4 << 20
MAX_KEYS = 8192
MAX_TOKENS = 262_144
JSON = "application/json"

HexKey = Annotated[
    str,
    msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$", description="A chunk's key, in hex."),
]
Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", description="A fingerprint, in hex.")]
HexBytes = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){0,4096}$")]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=64)]


class Problem(msgspec.Struct, frozen=True):
    """Reason why a request was not served."""

    what: str
    expected: str
    do: str


class Health(msgspec.Struct, frozen=True):
    """State of the server. ``live``: the loop runs. ``ready``: engines are let in."""

    live: bool
    ready: bool
    trouble: list[str]
    """Troubles now, such as a tier that is left alone. They cost hits: the server stays ready."""


class Lookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run to look up: ``keys``, or ``fingerprint`` and ``tokens`` (the whole prompt), which give
    the keys. A server that follows engines takes ``tokens`` alone too, and answers for them."""

    keys: Annotated[list[HexKey], msgspec.Meta(max_length=MAX_KEYS)] | None = None
    fingerprint: Hex32 | None = None
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)] | None = None
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256
    salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """vLLM's cache_salt of the request."""
    extra: HexBytes | None = None
    """Bytes, in hex, that are hashed before the tokens, instead of ``salt``."""


class TierLookup(msgspec.Struct, frozen=True):
    tier: str
    chunks: int
    """Leading chunks that this tier holds by itself."""


class SizeClassLookup(msgspec.Struct, frozen=True):
    slot_bytes: int
    ready: int
    """Leading chunks that RAM serves at once."""
    coming: int
    """Chunks after the ready ones that lower tiers, together, can bring up."""
    tiers: list[TierLookup]


class EngineTierLookup(msgspec.Struct, frozen=True):
    tier: str
    """``gpu``, ``cpu``, ``storage``, or the name of a tier that other hosts reach too."""
    tokens: int
    """Leading tokens that this tier holds by itself."""


class EngineLookup(msgspec.Struct, frozen=True):
    """Tokens that an engine has, by its own events."""

    engine: str
    tokens: int
    """Leading tokens that its tiers, together, hold."""
    tiers: list[EngineTierLookup]
    followed: bool
    """Whether its event stream is connected. If not, nothing is known, and every count is 0."""


class LookupAnswer(msgspec.Struct, frozen=True):
    """Chunks of a run that can be served. Chunks known to a shared tier alone are not counted:
    engines' loads ask it."""

    chunks: int
    """Number of whole chunks that were looked up."""
    size_classes: list[SizeClassLookup]
    engines: list[EngineLookup]
    """Answers of the engines in ``admin.engines``, if ``tokens`` were given and no ``extra``."""


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Knowledge of the last prompt of the ``session`` of a tenant (``namespace``; "" is engines
    without one)."""

    session: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    namespace: Name = ""
    salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """vLLM's cache_salt of the session's requests."""
    over: bool = False
    """Whether the session has ended."""
    keep_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_KEEP_S)] = 0.0
    """Seconds after the session's last prompt within which the next one comes."""


class Hinted(msgspec.Struct, frozen=True):
    told: int
    """Number of the tenant's models that were told, whether they know the session or not."""


class InvalidateAll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunks to clear: of ``namespace`` (one tenant, of all models; "" is engines without one), or
    ``everything``."""

    namespace: Name | None = None
    everything: bool = False


class Cleared(msgspec.Struct, frozen=True):
    complete: bool
    """Whether nothing was left, owed or untouched at the end."""
    chunks: int
    left: int
    """Chunks being saved by engines, or not yet deleted below, when the call gave up waiting."""
    owed_deletes: int
    """Deletes that Redis or a bucket gets when it can be reached again. They are lost if the server
    ends."""
    untouched: list[str]
    """Folders of closed size classes that another process has open, and shared tiers that were not
    searched to the end."""


class Namespace(msgspec.Struct, frozen=True):
    slot_bytes: int
    fingerprint: Hex32
    namespace: str
    engine: str
    """Model and process of the engine that came last."""


class Namespaces(msgspec.Struct, frozen=True):
    """Tenants whose engines were here since the start, which lookup and clear can name."""

    namespaces: list[Namespace]


class Setting(msgspec.Struct, frozen=True):
    """A key of the configuration that is in effect."""

    key: str
    value: str | int | float | bool | None
    """Value in effect, with passwords masked."""
    source: str
    """Source of the value: a file, a variable, auto-config, or nothing (default)."""
    unit: str
    reason: str


class Configuration(msgspec.Struct, frozen=True):
    """Keys of the configuration, in the order of ``kvtier config``."""

    keys: list[Setting]


class Route(NamedTuple):
    """A route. ``work``: the method of ``Admin`` that serves it. ``secret``: needs the token
    always, not only beyond loopback. ``open``: never needs it. ``asks``: the form of the body."""

    method: str
    path: str
    work: str
    asks: Any = None
    secret: bool = False
    open: bool = False


ROUTES = (
    Route("GET", "/", "show", open=True),
    Route("GET", "/healthz", "ready", open=True),
    Route("GET", "/healthz/live", "live", open=True),
    Route("GET", "/healthz/ready", "ready", open=True),
    Route("GET", "/metrics", "metrics"),
    Route("GET", "/v1/stats", "stats"),
    Route("GET", "/v1/history", "past"),
    Route("GET", "/v1/configuration", "configured", secret=True),
    Route("GET", "/v1/namespaces", "namespaces", secret=True),
    Route("POST", "/v1/lookup", "lookup", Lookup, secret=True),
    Route("POST", "/v1/hint", "hint", Hint, secret=True),
    Route("POST", "/v1/clear", "clear", InvalidateAll, secret=True),
    Route("GET", "/openapi.json", "openapi"),
)
"""Routes of the interface. ``openapi.json`` describes them too, and a test compares the two."""
