"""A proxy before a real S3 server, which does to requests and answers what a test tells it."""

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from tests.http_server import answered_by

_NOT_PASSED = ("connection", "content-length", "date", "host", "server", "transfer-encoding")


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    pieces: tuple[int, ...] | None = None
    """How many bytes of the body are sent before each second of silence. What is left is not sent.
    None: all at once."""


Refuse = Callable[[str, str], Answer | None]
"""Method and path of a request -> an answer that the server behind never hears of."""
Change = Callable[[str, str, Answer], Answer]
"""Method, path, and the server's answer -> what is answered."""


class S3Proxy:
    """Use as a context manager. ``seen`` has method and path of every request."""

    def __init__(self, server):
        self._server = server
        self.refuse: Refuse = lambda *_: None
        self.change: Change = lambda *told: told[2]
        self.seen: list[tuple[str, str]] = []
        self.over = threading.Event()

    @property
    def environment(self):
        return self._server.environment | {"AWS_ENDPOINT_URL": self._url}

    def well(self):
        self.__init__(self._server)  # type: ignore[misc]

    def __enter__(self):
        self._stack = ExitStack()
        self._url = self._stack.enter_context(answered_by(self._go))
        return self

    def __exit__(self, *_):
        self.over.set()
        self._stack.close()

    def passed(self, method, path, headers, body):
        kept = {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED}
        kept.setdefault("Content-Type", "application/octet-stream")  # else urllib says: a form
        data = body if method in ("PUT", "POST") else None
        url = f"{self._server.endpoint}{path}"
        request = urllib.request.Request(url, data, kept, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
                return Answer(reply.status, reply.read(), tuple(reply.headers.items()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), tuple(error.headers.items()))

    def _go(self, request):
        told = request.command, request.path
        self.seen.append(told)
        answer = self.refuse(*told)
        if answer is None:
            answer = self.change(*told, self.passed(*told, request.headers, request.body))
        kept = {name: value for name, value in answer.headers if name.lower() not in _NOT_PASSED}
        length = dict(answer.headers).get("Content-Length", "") if request.command == "HEAD" else ""
        kept["Content_Length"] = length or str(len(answer.body))
        if answer.pieces is None or request.command == "HEAD":
            request.answer(answer.body, answer.status, **kept)
            return
        request.close_connection = True
        request.answer(b"", answer.status, **kept)
        at = 0
        for size in answer.pieces:
            request.wfile.write(answer.body[at : at + size])
            request.wfile.flush()
            at += size
            if self.over.wait(1.0):
                return
