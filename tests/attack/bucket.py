"""A hostile S3 server: one that answers whatever it likes to whoever uses its bucket."""

import time
from collections.abc import Callable
from contextlib import contextmanager

from tests.http_server import Exchange, answered_by

_PIECE = bytes(64 << 10)
_CHUNKED = b"%x\r\n%s\r\n" % (len(_PIECE), _PIECE)
_LAST_WRITE = "Wed, 25 Nov 2026 00:00:00 GMT"

Answer = Callable[[Exchange], None]


class Seen:
    def __init__(self):
        self.requests: list[tuple[str, str]] = []
        self.sent: list[int] = []


@contextmanager
def hostile(answer, host="127.0.0.1"):
    seen = Seen()

    def answered(request):
        seen.requests.append((request.command, request.path))
        try:
            answer(request)
        except OSError:
            request.close_connection = True
        finally:
            seen.sent.append(getattr(request, "sent", 0))

    with answered_by(answered, host) as url:
        yield url, seen


def environment(url):
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_REGION": "us-east-1",
    }


class Turncoat:
    """Keeps objects as it should, and names none in its lists, until it lies.

    ``lies``: what it answers to a method, or to ``LIST``, from then on.
    """

    def __init__(self):
        self.lies: dict[str, Answer] = {}
        self._objects: dict[str, bytes] = {}

    def __call__(self, request):
        name, _, query = request.path.partition("?")
        kind = "LIST" if "list-type" in query else request.command
        if (lie := self.lies.get(kind)) is not None:
            lie(request)
            return
        content, status = b"", 200
        if kind == "LIST":
            content = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        elif kind == "POST":
            content = b"<DeleteResult></DeleteResult>"
        elif kind == "PUT":
            self._objects[name] = request.body
        elif name in self._objects:
            content = self._objects[name]
        else:
            status = 404
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        _object(request)
        if kind != "HEAD":
            request.wfile.write(content)


def endless_object(promised, most):
    def answer(request):
        request.send_response(200)
        request.send_header("Content-Length", str(promised))
        request.send_header("Transfer-Encoding", "chunked")
        _object(request)
        _flood(request, most)

    return answer


def endless_refusal(most):
    return _endless(403, most)


def endless_page(most):
    return _endless(200, most)


def _endless(status, most):
    def answer(request):
        request.send_response(status)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        _flood(request, most)

    return answer


def dripping_object(content, every_s):
    """The right bytes, and the last of them late: one in ``every_s``, sixteen in all."""

    def answer(request):
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        _object(request)
        request.wfile.write(content[:-16])
        for index in range(16, 0, -1):
            time.sleep(every_s)
            request.wfile.write(content[len(content) - index :][:1])

    return answer


def elsewhere(url, status=307):
    def answer(request):
        request.send_response(status)
        request.send_header("Location", url)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def _object(request):
    request.send_header("ETag", '"x"')
    request.send_header("Last-Modified", _LAST_WRITE)
    request.end_headers()


def _flood(request, most):
    request.sent = 0
    while request.sent < most:
        request.wfile.write(_CHUNKED)
        request.sent += len(_PIECE)
    request.wfile.write(b"0\r\n\r\n")
