"""An S3 server on loopback (moto, ``make peers``): the command that starts it, and requests."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from kvtier.core.errors import ConfigError

_PEERS = Path(__file__).resolve().parents[2] / ".venv-peers"
_REQUEST_S = 10


def moto_command(port: int) -> list[str]:
    """Raises ConfigError when moto is not installed."""
    places = sorted(_PEERS.glob("moto-*/bin/python"))
    if not places:
        raise ConfigError("moto is not installed (make peers)")
    program = "from moto.server import main; main()"
    # Isolated (-I): its Python must not import what PYTHONPATH or the working directory holds.
    return [str(places[0]), "-I", "-c", program, "-H", "127.0.0.1", "-p", str(port)]


def s3_request(method: str, url: str) -> None:
    """Raises OSError when the server does not answer."""
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
        answer.read()
