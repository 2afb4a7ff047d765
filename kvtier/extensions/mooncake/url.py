"""Where Mooncake's store is: the only reader of ``mooncake_url``.

::

    mooncake://master[:50051][?parameter=value&...]

    bytes=64GiB                  our share of the pool (default: 256GiB)
    segment=16GiB                memory that this host lends to the pool (default: none)
    protocol=tcp|rdma            how bytes are moved (default: tcp)
    device=mlx5_0                RDMA devices, with commas (default: Mooncake chooses)
    metadata=P2PHANDSHAKE        Mooncake's metadata server (default: none, P2PHANDSHAKE)
    host=10.0.0.7                this host's address for the others (default: the one that the
                                 master is reached from)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from kvtier.core.errors import ConfigError
from kvtier.core.terminal import parse_size

EXPECTED = "mooncake://master:50051?bytes=64GiB&protocol=tcp"

_DEFAULT_PORT = 50051
_DEFAULT_BYTES = 256 << 30
_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*"
_MASTER = re.compile(rf"({_HOST})(?::(\d{{1,5}}))?/?")
_FORMS = {
    "bytes": r".+",
    "segment": r".+",
    "protocol": r"tcp|rdma",
    "device": r"[A-Za-z0-9_.,:-]+",
    "metadata": r"P2PHANDSHAKE|(https?|etcd)://[A-Za-z0-9._:/\[\]-]+",
    "host": _HOST,
}


@dataclass(frozen=True, slots=True)
class MooncakeUrl:
    host: str
    port: int
    bytes_: int = _DEFAULT_BYTES
    segment: int = 0
    protocol: str = "tcp"
    device: str = ""
    metadata: str = "P2PHANDSHAKE"
    own_host: str = ""

    @property
    def master(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def label(self) -> str:
        return f"mooncake://{self.master}"


def parse(text: str) -> MooncakeUrl:
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "mooncake":
        raise ConfigError(f"the scheme is not mooncake; expected {EXPECTED}")
    if re.search(r"[@#\s]", rest):
        raise ConfigError(
            f"there is an @, a # or a space; Mooncake takes no credentials; expected {EXPECTED}"
        )
    address, _, query = rest.partition("?")
    found = _MASTER.fullmatch(address)
    if found is None or not 0 < (port := int(found[2] or _DEFAULT_PORT)) < 1 << 16:
        raise ConfigError(f"the master's address is none; expected {EXPECTED}")
    given = _parameters(query)
    return MooncakeUrl(
        found[1],
        port,
        _size(given, "bytes") or _DEFAULT_BYTES,
        _size(given, "segment"),
        given.get("protocol", "tcp"),
        given.get("device", ""),
        given.get("metadata", "P2PHANDSHAKE"),
        given.get("host", ""),
    )


def masked(text: str) -> str:
    """Return ``text`` for logs: only the scheme if it cannot be read."""
    try:
        return parse(text).label
    except ConfigError:
        return "mooncake://***" if text.lower().startswith("mooncake:") else "***"


def safe(text: str) -> str | None:
    """Return ``text`` if it is a Mooncake URL without @ and #, which holds no secret, else None."""
    return text if re.fullmatch("(?i)mooncake://[^@#]*", text) else None


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"behind the ? is no parameter=value; expected {EXPECTED}") from None
    for name, value in pairs:
        if name not in _FORMS:
            raise ConfigError(f"an unknown parameter; known are {', '.join(_FORMS)}")
        if not re.fullmatch(_FORMS[name], value):
            raise ConfigError(f"the parameter {name} has a wrong value; expected {EXPECTED}")
    if len(dict(pairs)) < len(pairs):
        raise ConfigError("a parameter comes twice; give each once")
    return dict(pairs)


def _size(given: dict[str, str], name: str) -> int:
    text = given.get(name, "0")
    try:
        return 0 if text == "0" else parse_size(text)
    except ValueError:
        raise ConfigError(
            f"the parameter {name} is no size; expected such as {name}=64GiB"
        ) from None
