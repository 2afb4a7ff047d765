"""One request over HTTP and its answer, on a blocking socket."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from contextlib import closing
from urllib.parse import urlsplit


def exchange(
    url: str,
    path: str,
    sent: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> tuple[http.client.HTTPResponse, bytes]:
    """GET ``path`` below ``url``, or POST what is ``sent``: the answer, and its text. ``tls`` None:
    the system's authorities. Raises OSError and HTTPException."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        line: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=tls
        )
    else:
        line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    with closing(line):
        line.request("GET" if sent is None else "POST", parts.path + path, sent, headers)
        answer = line.getresponse()
        return answer, answer.read()
