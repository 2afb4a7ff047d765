"""A proxy before a real S3 server, which does to requests and answers what a test tells it."""

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

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
        port = self._listens.server_port
        return self._server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}

    def well(self):
        self.__init__(self._server)  # type: ignore[misc]

    def __enter__(self):
        proxy = self

        class Passage(_Passage):
            of = proxy

        self._listens = _Quiet(("127.0.0.1", 0), Passage)
        self._thread = threading.Thread(target=self._listens.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self._listens.shutdown()
        self._listens.server_close()
        self._thread.join()

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


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that has gone is no news."""


class _Passage(http.server.BaseHTTPRequestHandler):
    of: S3Proxy

    def _go(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = self.command, self.path
        self.of.seen.append(told)
        answer = self.of.refuse(*told)
        if answer is None:
            answer = self.of.change(*told, self.of.passed(*told, self.headers, body))
        self.send_response(answer.status)
        length = dict(answer.headers).get("Content-Length", "") if self.command == "HEAD" else ""
        for name, value in answer.headers:
            if name.lower() not in _NOT_PASSED:
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(answer)

    def _send(self, answer):
        if answer.pieces is None:
            self.wfile.write(answer.body)
            return
        at = 0
        for size in answer.pieces:
            self.wfile.write(answer.body[at : at + size])
            self.wfile.flush()
            at += size
            if self.of.over.wait(1.0):
                return

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _go  # noqa: N815

    def log_message(self, *_):
        pass
