"""What the admin surface is asked and answers: one Struct a form, one row a route, and the OpenAPI
document of both.

The document is generated from what decodes the requests and encodes the answers, so it cannot
differ from them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import msgspec

import kvtier
from kvtier.admin.page import HTML
from kvtier.admin.status import Stats
from kvtier.core.chunk import KEY_BYTES
from kvtier.store.hints import LONGEST_KEEP_S

MAX_BODY = 4 << 20
MAX_KEYS = 8192
MAX_TOKENS = 262_144
TEXT = "text/plain"
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
    """Why a request was not served."""

    what: str
    expected: str
    do: str


class Health(msgspec.Struct, frozen=True):
    """``live``: the loop runs. ``ready``: engines are let in; false while starting and stopping."""

    live: bool
    ready: bool
    trouble: list[str]
    """What is wrong now, such as a tier that is left alone. It costs hits: the server stays
    ready."""


class Lookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either ``keys``, or ``fingerprint`` and ``tokens`` (the whole prompt), from which keys are
    made."""

    keys: Annotated[list[HexKey], msgspec.Meta(max_length=MAX_KEYS)] | None = None
    fingerprint: Hex32 | None = None
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)] | None = None
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256
    salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """vLLM's cache_salt of the request."""
    extra: HexBytes | None = None
    """Instead of salt: all that is hashed before the tokens, in hex."""


class TierLookup(msgspec.Struct, frozen=True):
    tier: str
    chunks: int
    """Leading chunks that this tier holds by itself."""


class SizeClassLookup(msgspec.Struct, frozen=True):
    slot_bytes: int
    ready: int
    """Leading chunks that RAM serves at once."""
    coming: int
    """Chunks after these that lower tiers, together, can bring up."""
    tiers: list[TierLookup]


class LookupAnswer(msgspec.Struct, frozen=True):
    """How far a run can be served. What only a shared tier knows of is not counted: engines' loads
    ask it."""

    chunks: int
    """Whole chunks asked about."""
    size_classes: list[SizeClassLookup]


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of the last prompt of the ``session`` of a tenant (``namespace``; "" is engines
    without one)."""

    session: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    namespace: Name = ""
    salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """vLLM's cache_salt of the session's requests."""
    over: bool = False
    """The session has ended."""
    keep_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_KEEP_S)] = 0.0
    """It goes on within so many seconds after its last use."""


class Hinted(msgspec.Struct, frozen=True):
    """It is followed in the background."""

    told: int
    """Models of this tenant that were told; whether one knows the session is not."""


class InvalidateAll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either ``namespace`` (one tenant, of all models; "" is engines without one) or
    ``everything``."""

    namespace: Name | None = None
    everything: bool = False


class Cleared(msgspec.Struct, frozen=True):
    """What was forgotten; see the description of the call for what that means."""

    complete: bool
    """Nothing was left, owed or untouched at the end."""
    chunks: int
    """Chunks forgotten."""
    left: int
    """Chunks being saved by engines, or not yet deleted below, when the call gave up waiting."""
    owed_deletes: int
    """Deletes that Redis gets when it can be reached again; lost if the server ends before."""
    untouched: list[str]
    """Folders of closed size classes that another process has open; shared tiers that were not
    searched to the end."""


class Namespace(msgspec.Struct, frozen=True):
    slot_bytes: int
    fingerprint: Hex32
    namespace: str


class Namespaces(msgspec.Struct, frozen=True):
    """Whose engines were here since the start: what lookup and clear can name."""

    namespaces: list[Namespace]


class Route(NamedTuple):
    """``secret``: needs the token always, not only beyond loopback. ``open``: never needs it."""

    method: str
    path: str
    summary: str
    description: str
    answers: dict[int, Any]
    asks: Any = None
    secret: bool = False
    open: bool = False


_ERASE = """
Forgets chunks in RAM and in the lower tiers, again and again until nothing is left or about ten
seconds are over. A chunk that was forgotten is never served again by this server, nor after its
restart.

A namespace of which no chunk is found and no engine came since the start is refused (404): it may
be misspelt.

With `namespace`: everything that engines of this tenant saved, of all models, before the server's
last start too, and nothing of others: the tiers keep a hash of the tenant's name with every chunk.
In the Redis of a size class that is open this includes what other servers wrote there; it is
searched for at most ten seconds a node, and named in `untouched` when that was not enough. Where a
tier did not say whose a chunk is (a damaged header, Redis away when it was found, chunks from
before this was kept) it is nobody's and goes with any tenant: that costs misses. Not covered:
chunks in Redis of size classes of which no engine has come since the start, or that a kvtier with
another format of names (kvtier:1:) left there; the RAM and disks of other servers (call each of
them), the RAM of engines on other hosts, and what engines save after the call. A request's
cache_salt is not a tenant here.

On a disk, a forgotten chunk's record is emptied; its bytes stay in the slot, unreachable, until
they are overwritten. A power cut within the kernel's write-back time can undo the emptying. Size
classes of which no engine has come since the start are erased on the disk, and lose their files
when nothing is left in them."""

ROUTES = (
    Route(
        "GET",
        "/",
        "A page for people",
        "Shows /v1/stats as it changes; one file, no secret in it.",
        {200: HTML},
        open=True,
    ),
    Route(
        "GET",
        "/healthz",
        "Live and ready",
        "503: starting or stopping.",
        {200: Health, 503: Health},
        open=True,
    ),
    Route(
        "GET",
        "/healthz/live",
        "Live",
        "Answers as long as the loop runs.",
        {200: Health},
        open=True,
    ),
    Route(
        "GET",
        "/healthz/ready",
        "Ready",
        "503 while starting or stopping. A tier that is away is named in trouble and is no reason "
        "for 503.",
        {200: Health, 503: Health},
        open=True,
    ),
    Route(
        "GET",
        "/metrics",
        "Prometheus' text",
        "Every number of /v1/stats, as kvtier_*.",
        {200: TEXT},
    ),
    Route(
        "GET", "/v1/stats", "All counts", "Since the start of the server, in chunks.", {200: Stats}
    ),
    Route(
        "GET",
        "/v1/namespaces",
        "Who was here",
        "Models and tenants.",
        {200: Namespaces},
        secret=True,
    ),
    Route(
        "POST",
        "/v1/lookup",
        "How far a prompt can be served",
        "Needs the token even on loopback: it tells which prompts were seen. No effect on the "
        "order of leaving.",
        {200: LookupAnswer},
        Lookup,
        secret=True,
    ),
    Route(
        "POST",
        "/v1/hint",
        "A session is over, or goes on soon",
        "Soft: it changes the order of leaving. What other sessions share stays. A wrong hint "
        "costs a recompute.",
        {200: Hinted},
        Hint,
        secret=True,
    ),
    Route(
        "POST",
        "/v1/clear",
        "Forget a tenant or everything",
        _ERASE.strip(),
        {200: Cleared},
        InvalidateAll,
        secret=True,
    ),
    Route("GET", "/openapi.json", "This document", "OpenAPI 3.1.", {200: JSON}),
)
_HOW_TO_PROVE = (
    "What admin_token_file has. kvtier's own commands sign with it instead of sending it."
)
_ERRORS = {
    400: "The request is malformed.",
    401: "The token is missing or wrong.",
    404: "No chunk of this namespace was found, and no engine of it came since the start.",
    403: "The server has no admin_token_file, which this call needs.",
    413: f"The body has more than {MAX_BODY:,} bytes.",
    415: "The body is not application/json.",
    421: "The Host header does not name this host.",
    500: "A bug; the log has it.",
    503: "The server is stopping, or has too much to do.",
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = {
        kind
        for route in ROUTES
        for kind in (*route.answers.values(), route.asks)
        if isinstance(kind, type)
    }
    ordered = [*sorted(structs, key=lambda kind: kind.__name__), Problem]
    _, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvtier admin",
            "version": kvtier.__version__,
            "license": {"name": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": _HOW_TO_PROVE}
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}"),
        "summary": route.summary,
        "description": route.description,
        # {}: not needed where the surface is bound to loopback.
        "security": [] if route.open else [{"token": []}] if route.secret else [{}, {"token": []}],
        "responses": {str(status): _answer(kind) for status, kind in route.answers.items()},
    }
    if route.asks is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _reference(route.asks)}},
        }
    for status in _errors(route):
        problem = {
            "description": _ERRORS[status],
            "content": {JSON: {"schema": _reference(Problem)}},
        }
        operation["responses"].setdefault(str(status), problem)
    return operation


def _errors(route: Route) -> set[int]:
    errors = {421, 500}
    if not route.open:
        errors |= {401, 503}
    if route.secret:
        errors |= {403}
    if route.asks is not None:
        errors |= {400, 413, 415}
    if route.asks is InvalidateAll:
        errors |= {404}
    return errors


def _answer(kind: Any) -> dict[str, Any]:
    if kind == HTML:
        return {"description": "The page.", "content": {HTML: {"schema": {"type": "string"}}}}
    if kind == TEXT:
        return {
            "description": "Prometheus' text format.",
            "content": {TEXT: {"schema": {"type": "string"}}},
        }
    schema = {"type": "object"} if kind == JSON else _reference(kind)
    text = (getattr(kind, "__doc__", None) or "The document.").partition("\n")[0]
    return {
        "description": text if isinstance(kind, type) else "The document.",
        "content": {JSON: {"schema": schema}},
    }


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
