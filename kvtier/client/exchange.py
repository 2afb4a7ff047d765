"""One request over HTTP and its answer, on a blocking socket."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from contextlib import closing
from urllib.parse import urlsplit

from kvtier.client.deadline import Deadline, reach

_PORTS = {"http": 80, "https": 443}


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
    line = http.client.HTTPConnection(parts.hostname, parts.port or _PORTS[parts.scheme])
    with closing(line):
        line.sock = reach(line.host, line.port, Deadline(timeout_s))
        if parts.scheme == "https":
            trusted = ssl.create_default_context() if tls is None else tls
            line.sock.settimeout(timeout_s)
            line.sock = trusted.wrap_socket(line.sock, server_hostname=line.host)
        line.sock.settimeout(timeout_s)
        line.request("GET" if sent is None else "POST", parts.path + path, sent, headers)
        answer = line.getresponse()
        return answer, answer.read()
