"""Admin: the HTTP interface of a server, on the server's own loop: a page, health, metrics, counts,
lookup and clear.

Who may call what: on loopback, health, metrics and counts are open to every process of the host.
Requests that tell which prompts were seen (lookup), who came and what is configured, or that
destroy (clear) always need the token, because a loopback port is open to every user of the host and
a Unix socket of mode 0600 is not. On other addresses every request needs the token, except health
and the page's file. The data that the page shows needs it.

A browser on the host must not become a way in. On loopback the Host header has to name this host (a
page whose name was rebound to 127.0.0.1 sends its own name), there are no CORS headers, and bodies
must say that they are JSON. What clients send is bounded before it is kept, and the log quotes
nothing of it.

The token is either sent as it is (``Authorization: Bearer``, for curl and routers), or it only
signs the request (:mod:`kvtier.protocol.admin_proof`, for ``kvtier stats`` and ``kvtier clear``).
The answer to a signed request is signed. A token that is made of it is good for the metrics alone.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvtier.admin import forms, prometheus, status
from kvtier.admin.places import MOST_REQUESTS, Places, Port, without_port
from kvtier.admin.purge import purge
from kvtier.admin.status import EngineIndex, History
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.deadline import is_loopback
from kvtier.core.errors import KVTierError
from kvtier.core.steps import PIECE_CHUNKS, Steps, pieces
from kvtier.eviction.hints import Hint, salt_name, session_name
from kvtier.protocol import admin_proof
from kvtier.server.extension import in_turns, running
from kvtier.server.server import Server
from kvtier.server.session import owners_session
from kvtier.server.strangers import LogLimit
from kvtier.store.store import Store

logger = logging.getLogger("kvtier.admin")

_IDLE_S = 15.0
_PIECE_KEYS = 2048
_MOST_NAMES = 20
_HIDDEN = "{} in trouble; ask with the token, or see the server's log"
_LINGER_S = 1.0
"""Time for which the rest of a body is thrown away after its request was answered."""


def _without_quoting(record: logging.LogRecord) -> bool:
    """Remove an error's text: aiohttp quotes the line that it cannot read, perhaps a token."""
    cause = record.exc_info[1] if record.exc_info else None
    if cause is not None:
        record.msg, record.args = f"{record.getMessage()}: {type(cause).__name__}", ()
        record.exc_info = None
    return True


_STRANGERS = logging.getLogger("kvtier.admin.http")
"""Logger of aiohttp for requests that are not valid HTTP. Any client can send them."""
_STRANGERS.addFilter(_without_quoting)
_STRANGERS.addFilter(LogLimit(10, 10.0))
_DOCUMENT = Path(__file__).with_name("openapi.json")
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "kvtier"}


class Around(NamedTuple):
    """Facts that the interface shows or uses, beside the server."""

    nvme_folders: Sequence[Path]
    """Folders that contain the size classes' folders."""
    configuration: forms.Configuration
    """Configuration in effect, for those who have the token."""
    engines: EngineIndex = EngineIndex()


@asynccontextmanager
async def beside(
    server: Server, port: Port, token: bytes | None, around: Around
) -> AsyncIterator[None]:
    places, history = Places(server.loop, port.tls), History(server)
    runner = web.AppRunner(
        Admin(server, port, token, around, places, history).app(),
        access_log=None,
        logger=_STRANGERS,
        handle_signals=False,
        keepalive_timeout=_IDLE_S,
        auto_decompress=False,  # else strangers have gigabytes unpacked
        lingering_time=_LINGER_S,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    assert runner.server is not None
    logger.info(
        "admin interface at %s%s",
        port.url,
        "" if token else "; no token, so without lookup and clear",
    )
    try:
        async with running(places.accept(port.socket, runner.server), history.keeping()):
            yield
    finally:
        port.socket.close()
        await runner.cleanup()


class _RefusedError(Exception):
    def __init__(self, status: int, what: str, expected: str, do: str) -> None:
        super().__init__(what)
        self.status = status
        self.problem = forms.Problem(what, expected, do)


class Admin:
    """Application over one server, on its loop, in turns of a few milliseconds."""

    def __init__(
        self,
        server: Server,
        port: Port,
        token: bytes | None,
        around: Around,
        places: Places,
        history: History,
    ) -> None:
        self._server = server
        self._places = places
        self._history = history
        self._seen = admin_proof.Seen()
        self._start = secrets.token_hex(16)
        """Random word of this start. A request that was signed for another start or server is
        refused. Changes when the clock is set, because older requests would be valid again."""
        self._clock_s = time.time() - time.monotonic()
        self._port = port
        self._token = token
        self._reader = None if token is None else admin_proof.metrics_token(token).encode()
        self._around = around
        self._page, self._page_headers = page()
        self._document = _DOCUMENT.read_bytes()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._answered], client_max_size=forms.MAX_BODY_BYTES)
        app.on_response_prepare.append(self._name_start)
        for route in forms.ROUTES:
            work = getattr(self, route.work)
            app.router.add_route(route.method, route.path, self._guarded(route, work))
            if route.open:  # as balancers ask: HAProxy's default is OPTIONS /
                serve = self._guarded(route, work if route.path != "/" else self.ready)
                for method in ("HEAD", "OPTIONS"):
                    app.router.add_route(method, route.path, serve)
        return app

    async def _name_start(self, _: web.Request, answer: web.StreamResponse) -> None:
        answer.headers[admin_proof.START_HEADER] = self._start

    # ---- the way in ------------------------------------------------------------------------------

    def _guarded(
        self, route: forms.Route, work: Callable[[Any], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            signed = self._signed_body(request)
            if signed is None and (route.secret or not (route.open or self._port.local)):
                self._prove(request)
            if not route.open and self._places.at_work > MOST_REQUESTS:
                raise _RefusedError(
                    503, f"{MOST_REQUESTS} requests under way", "fewer at once", "ask again later"
                )
            if route.open:
                asked: Any = self._port.local or signed is not None or self._is_known(request)
            else:
                asked = None if route.asks is None else await _body(request, route.asks, signed)
            answer = await work(asked)
            if signed is not None and self._token is not None:
                credentials, body = request.headers["Authorization"], answer.body
                assert isinstance(body, bytes)
                proof = admin_proof.answered(self._token, credentials, answer.status, body)
                answer.headers[admin_proof.ANSWER_HEADER] = proof
            return answer

        return serve

    @web.middleware
    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Serve a request: check who may ask, and put an error into words."""
        try:
            self._expect_our_name(request)
            with self._places.request(request.protocol):
                return await handler(request)
        except _RefusedError as error:
            return _json(error.problem, error.status)
        except web.HTTPException as error:
            return _json(_plain(request, error), error.status, error.headers.get("Allow"))
        except KVTierError as error:
            return _json(
                forms.Problem(str(error), "a server that is not stopping", "ask again later"), 503
            )
        except Exception:
            logger.exception("a bug: %s %s", request.method, request.path)
            problem = forms.Problem(
                "internal error", "an answer", "see the server's log, and report it"
            )
            return _json(problem, 500)

    def _expect_our_name(self, request: web.Request) -> None:
        """Refuse a Host that is not ours. A browser always names one, a probe by HTTP/1.0 none."""
        named = request.headers.get("Host")
        if named is None:
            return
        if self._port.local and not is_loopback(without_port(named)):
            do = f"ask at {self._port.url}"
            raise _RefusedError(421, f"Host: {named[:100]}", "localhost or a loopback address", do)

    def _signed_body(self, request: web.Request) -> str | None:
        """Return the SHA-256 that the body must have. None if the token did not sign this request,
        or the same signature came before."""
        credentials, now = request.headers.get("Authorization", ""), time.time()
        if self._token is None:
            return None
        clock_s = now - time.monotonic()
        if abs(clock_s - self._clock_s) > admin_proof.VALID_S / 2:
            self._start, self._seen = secrets.token_hex(16), admin_proof.Seen()
            self._clock_s = clock_s
        digest = admin_proof.body_digest(
            self._token, credentials, request.method, request.path, now, self._start
        )
        return digest if digest is not None and self._seen.first(credentials, now) else None

    def _is_known(self, request: web.Request) -> bool:
        try:
            self._prove(request)
        except _RefusedError:
            return False
        return True

    def _prove(self, request: web.Request) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        shown = given.strip().encode(errors="surrogateescape")
        is_bearer = scheme.lower() == "bearer"
        for_metrics = self._reader is not None and hmac.compare_digest(shown, self._reader)
        if for_metrics and is_bearer and request.path == "/metrics":
            return
        if self._token is None:
            what = f"{request.path} and no token is configured"
            raise _RefusedError(403, what, "a server with admin_token_file", "set it, restart")
        known = hmac.compare_digest(shown, self._token)
        if not is_bearer or not known:
            raise _RefusedError(
                401,
                "no token, or a wrong one",
                "Authorization: Bearer <token>",
                "send what admin_token_file has; a signed request is valid once, at one start of "
                "one server, and only while both clocks agree to a minute",
            )

    # ---- requests --------------------------------------------------------------------------------

    async def show(self, _: bool) -> web.Response:
        return web.Response(body=self._page, headers={**_HEADERS, **self._page_headers})

    async def live(self, known: bool) -> web.Response:
        return _json(self._health(known), 200)

    async def ready(self, known: bool) -> web.Response:
        return _json(self._health(known), 200 if self._server.ready else 503)

    def _health(self, known: bool) -> forms.Health:
        """Return the health. Troubles are for those who may know engines, tiers and folders."""
        trouble = status.trouble(self._server)
        if trouble and not known:
            trouble = [_HIDDEN.format(len(trouble))]
        return forms.Health(True, self._server.ready, trouble)

    async def metrics(self, _: None) -> web.Response:
        text = prometheus.exposition(status.read(self._server, self._around.engines.status()))
        return web.Response(
            body=text, headers={**_HEADERS, "Content-Type": prometheus.CONTENT_TYPE}
        )

    async def stats(self, _: None) -> web.Response:
        return _json(status.read(self._server, self._around.engines.status()), 200)

    async def past(self, _: None) -> web.Response:
        return _json(self._history.told(), 200)

    async def configured(self, _: None) -> web.Response:
        return _json(self._around.configuration, 200)

    async def namespaces(self, _: None) -> web.Response:
        found = [
            forms.Namespace(size, fingerprint.hex(), name, owner.engine)
            for size, size_class in self._server.size_classes.open.items()
            for (fingerprint, name), owner in size_class.owners.items()
        ]
        return _json(forms.Namespaces(found), 200)

    async def lookup(self, asked: forms.Lookup) -> web.Response:
        engines = await self._lookup_engines(asked)
        alone = engines and asked.keys is None and asked.fingerprint is None
        keys = [] if alone else await in_turns(_keys(asked))
        size_classes = []
        for size, size_class in () if alone else list(self._server.size_classes.open.items()):
            store = size_class.store
            ready, coming = (await in_turns(store.lookup.steps(keys))).progress
            names = ["ram", *(tier.name for tier in store.tiers)]
            counts = await in_turns(_by_tier(store, keys))
            tiers = [forms.TierLookup(*pair) for pair in zip(names, counts, strict=True)]
            size_classes.append(forms.SizeClassLookup(size, ready, coming, tiers))
        return _json(forms.LookupAnswer(len(keys), size_classes, engines), 200)

    async def _lookup_engines(self, asked: forms.Lookup) -> list[forms.EngineLookup]:
        if asked.tokens is None or asked.extra is not None:
            return []
        return await self._around.engines.lookup(asked.tokens, asked.salt)

    async def hint(self, asked: forms.Hint) -> web.Response:
        hint = Hint(asked.over, asked.keep_s, salt_name(asked.salt))
        name = session_name(asked.salt, asked.session)
        told = 0
        for size_class in self._server.size_classes.open.values():
            for (_, namespace), owner in size_class.owners.items():
                if namespace == asked.namespace:
                    size_class.store.hint((), hint, owners_session(owner.number, name))
                    told += 1
        return _json(forms.Hinted(told), 200)

    async def clear(self, asked: forms.InvalidateAll) -> web.Response:
        if asked.everything == (asked.namespace is not None):
            what = "both or neither of namespace and everything"
            raise _RefusedError(400, what, "one of them", 'send {"namespace": "..."} for a tenant')
        cleared = await purge(self._server.size_classes, asked.namespace, self._around.nvme_folders)
        nothing = not (cleared.chunks or cleared.left or cleared.owed_deletes)
        if asked.namespace is not None and nothing:
            self._expect_known(asked.namespace, cleared.untouched)
        whose = "everything" if asked.everything else f"namespace {asked.namespace!r}"
        logger.warning("cleared %s%s: %s", whose, "" if cleared.complete else " in part", cleared)
        return _json(cleared, 200)

    def _expect_known(self, namespace: str, untouched: Sequence[str]) -> None:
        """Refuse a name that may be misspelt: no chunk of it was there and no engine came.
        ``untouched``: places that could not be searched."""
        known = sorted(
            {
                name
                for size_class in self._server.size_classes.open.values()
                for _, name in size_class.owners
            }
        )
        if namespace in known:
            return
        near = difflib.get_close_matches(namespace, known, n=1)
        raise _RefusedError(
            404,
            f"namespace {namespace!r}: no chunk of it was found, and no engine of it came since "
            "the server's start" + "".join(f"; not searched: {place}" for place in untouched),
            f"one of {len(known)}: {', '.join(map(repr, known[:_MOST_NAMES])) or 'none is known'}",
            f"did you mean {near[0]!r}?"
            if near
            else "see /v1/namespaces; if the name is right, nothing of it is left",
        )

    async def openapi(self, _: None) -> web.Response:
        return web.Response(body=self._document, headers={**_HEADERS, "Content-Type": forms.JSON})


def _by_tier(store: Store, keys: Sequence[ChunkKey]) -> Steps[list[int]]:
    found: list[int] = []
    for number, part in enumerate(pieces(keys)):
        begun = number * PIECE_CHUNKS
        held = store.lookup_by_tier(part)
        found = [
            begun + more if before == begun else before
            for before, more in zip(found or [0] * len(held), held, strict=True)
        ]
        if max(found) < begun + len(part):
            break
        yield 0.0
    return found


def _keys(asked: forms.Lookup) -> Steps[list[ChunkKey]]:
    """Make the keys that a lookup names, in pieces. Raises a refusal if that is not clear."""
    if asked.keys is not None and asked.tokens is None and asked.fingerprint is None:
        return [ChunkKey(bytes.fromhex(key)) for key in asked.keys]
    if asked.keys is not None or asked.tokens is None or asked.fingerprint is None:
        raise _RefusedError(
            400,
            "not one way to name chunks",
            "keys, or fingerprint and tokens",
            "see /v1/namespaces for fingerprints",
        )
    if asked.salt is not None and asked.extra is not None:
        raise _RefusedError(
            400, "salt and extra", "at most one of them", "leave out the one that is not needed"
        )
    extra = bytes.fromhex(asked.extra or "")
    if asked.salt:
        extra = json.dumps({"lora": None, "salt": asked.salt}, sort_keys=True).encode()
    layout = ChunkLayout(bytes.fromhex(asked.fingerprint), asked.chunk_tokens, 1, (1,))
    chain, step = layout.chain(extra), asked.chunk_tokens * _PIECE_KEYS
    for end in range(step, len(asked.tokens), step):
        chain.extend(asked.tokens[:end])
        yield 0.0
    return chain.extend(asked.tokens)


async def _body(request: web.Request, form: type[Any], digest: str | None) -> Any:
    """Read a body as ``form``. ``digest``: the SHA-256 that was signed, or None if none was."""
    if request.content_type != forms.JSON:
        what = f"Content-Type: {request.content_type[:100]}"
        raise _RefusedError(415, what, forms.JSON, "send JSON and say so in the header")
    if encoding := request.headers.get("Content-Encoding"):
        raise _RefusedError(
            415, f"Content-Encoding: {encoding[:100]}", "none", "send the body as it is"
        )
    try:
        body = await request.read()
    except (web.RequestPayloadError, BadHttpMessage) as error:
        what = f"a body that is cut short or malformed: {type(error).__name__}"
        raise _RefusedError(400, what, "a whole body", "send it again") from None
    if digest is not None and not hmac.compare_digest(hashlib.sha256(body).hexdigest(), digest):
        raise _RefusedError(
            401, "the body is not the one that was signed", "the signed body", "sign the whole body"
        )
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.DecodeError as error:
        raise _RefusedError(
            400, str(error)[:500], f"a {form.__name__}", "see /openapi.json"
        ) from None


def _plain(request: web.Request, error: web.HTTPException) -> forms.Problem:
    """Put aiohttp's own refusals into our form."""
    if error.status == 413:
        return forms.Problem(
            "the body is too long",
            f"at most {forms.MAX_BODY_BYTES:,} bytes",
            "ask for less at once",
        )
    if error.status == 405:
        return forms.Problem(
            f"{request.method} {request.path[:100]}", "another method", "see the Allow header"
        )
    return forms.Problem(
        f"{request.path[:100]}: {error.reason}", "a path of /openapi.json", "correct the path"
    )


def _json(body: msgspec.Struct, status: int, allow: str | None = None) -> web.Response:
    headers = {**_HEADERS, "Content-Type": forms.JSON}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if allow is not None:
        headers["Allow"] = allow
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers)


def page() -> tuple[bytes, Mapping[str, str]]:
    """Return the page at ``/``, which asks ``/v1/stats`` every two seconds, and its headers. Their
    policy lets the browser run what is in the file and ask this server, and nothing else."""
    body = Path(__file__).with_name("page.html").read_bytes()
    policy = [
        "default-src 'none'",
        f"script-src '{_digest('script', body)}'",
        f"style-src '{_digest('style', body)}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return body, {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
    }


def _digest(tag: str, body: bytes) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
