"""Where Redis is: the only reader of ``redis_url``. It parses, refuses and masks. It opens nothing.

::

    redis://[[user]:password@]host[:6379][/database][?options]   one server; valkey:// is the same
    redis+cluster://[[user]:password@]host:port[,host:port]...   a cluster; any of its nodes
    redis+sentinel://[[user]:password@]host[:26379][,host:port].../service[/database]
    rediss, rediss+cluster, rediss+sentinel, valkeys ...         the same over TLS
    unix://[[user]:password@]/path/redis.sock[?options]

A URL can hold a password anywhere that a typing error puts it. So no error here shows a piece of a
URL, and :func:`masked` shows what was understood, or nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from kvtier.core.deadline import is_loopback
from kvtier.core.errors import ConfigError

EXPECTED = (
    "redis://host:6379/0, redis+cluster://host:port,host:port, "
    "redis+sentinel://host:port/service or unix:///path"
)
PORT, SENTINEL_PORT = 6379, 26379
MOST_SEEDS = 64

Kind = Literal["server", "cluster", "sentinel"]
Address = tuple[str, int]

_ESCAPES = "if the password contains / ? # @ : % or a space, write %2F %3F %23 %40 %3A %25 %20"
_SCHEME = re.compile(r"(redis|rediss|valkey|valkeys)(?:\+(cluster|sentinel))?|unix")
_HOST = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}))(?::([0-9]{1,5}))?"
)
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f-\xa0]")
_OURS = re.compile("(?is)(redis|valkey).*:|unix://.*[@#?]")
"""Pattern of texts that may be a URL with a password, however mistyped."""
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_OPTIONS = ("db", "username", "password", "sentinel_username", "sentinel_password", *_TLS)


@dataclass(frozen=True, slots=True)
class Login:
    """User and password. ``user`` None: Redis's default user. ``password`` None: no login."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    """Options of TLS. ``ca`` None: the system's. ``certificate`` and ``key``: this client's."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)
    verify: bool = True
    check_host: bool = True


@dataclass(frozen=True, slots=True)
class RedisUrl:
    scheme: str
    kind: Kind
    seeds: tuple[Address, ...]
    """Addresses of the server, cluster nodes, or sentinels. Empty for a Unix socket."""
    path: str
    service: str
    """Name that the sentinels give the primary, or empty."""
    database: int
    login: Login
    sentinel_login: Login
    tls: Tls | None

    @property
    def label(self) -> str:
        """Address for logs: no user, no password."""
        seeds = ",".join(map(address_text, self.seeds))
        return self.path or (f"{self.service} of {seeds}" if self.service else seeds)

    @property
    def local(self) -> bool:
        """Whether Redis takes this host's memory."""
        return bool(self.path) or any(is_loopback(host) for host, _ in self.seeds)

    @property
    def masked(self) -> str:
        user = f"{self.login.user or ''}:***@" if self.login.password is not None else ""
        where = self.path or ",".join(map(address_text, self.seeds))
        service = f"/{self.service}" if self.service else ""
        database = "" if self.kind == "cluster" or self.path else f"/{self.database}"
        return f"{self.scheme}://{user}{where}{service}{database}{self._options()}"

    def _options(self) -> str:
        shown = [f"db={self.database}"] if self.path and self.database else []
        if self.sentinel_login.password is not None:
            shown.append("sentinel_password=***")
        if self.tls is not None and self.tls.ca is not None:
            shown.append(f"ssl_ca_certs={self.tls.ca}")
        return "?" + "&".join(shown) if shown else ""


def address_text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(text: str) -> RedisUrl:
    """Parse ``redis_url``. Raises ConfigError, which never shows a piece of ``text``."""
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower()
    known = _SCHEME.fullmatch(scheme) if separator else None
    if known is None:
        raise ConfigError(
            "the scheme is not one of redis, rediss, valkey, valkeys (with +cluster, +sentinel) "
            f"or unix; expected {EXPECTED}"
        )
    if _UNPRINTABLE.search(rest) or "#" in rest:
        raise ConfigError(f"there is a space, a # or an unprintable character; {_ESCAPES}")
    authority = re.split("[/?]", rest, maxsplit=1)[0]
    tail = rest[len(authority) :]
    if "@" in tail:
        raise ConfigError(f"there is an @ behind the host or the path; {_ESCAPES}")
    path, _, query = tail.partition("?")
    options = _options(query)
    userinfo, at, hosts = authority.rpartition("@")
    login = _login(userinfo, bool(at), options)
    kind: Kind = known[2] or "server"  # type: ignore[assignment]
    tls = _tls(options, known[1] in ("rediss", "valkeys"))
    if kind != "sentinel" and any(name.startswith("sentinel_") for name in options):
        raise ConfigError("sentinel_username and sentinel_password are for redis+sentinel:// only")
    sentinel_login = _pair(options.get("sentinel_username"), options.get("sentinel_password"))
    if scheme == "unix":
        if hosts or len(path) < 2:
            raise ConfigError(
                f"a Unix socket needs an absolute path, and no host; {_ESCAPES}; expected "
                f"{EXPECTED}"
            )
        return RedisUrl(
            scheme, kind, (), _decoded(path), "", _database("", options), login, sentinel_login, tls
        )
    seeds = _seeds(hosts, kind)
    service, database = _path(path, kind, options)
    return RedisUrl(scheme, kind, seeds, "", service, database, login, sentinel_login, tls)


def masked(text: str) -> str:
    """Return ``text`` for logs, without passwords: its scheme only, if it cannot be read."""
    try:
        return parse(text).masked
    except ConfigError:
        scheme, separator, _ = text.partition("://")
        known = separator and _SCHEME.fullmatch(scheme.lower())
        return f"{scheme.lower()}://***" if known else "***"


def safe(text: str) -> str | None:
    """Return :func:`masked` of a text that may hold a Redis password, None for any other text."""
    return masked(text) if _OURS.match(text) else None


def _options(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name not in _OPTIONS:
            raise ConfigError(
                f"an option is not one of {', '.join(_OPTIONS)}; {_ESCAPES}, and %26 for &"
            )
        if name in found or not value:
            raise ConfigError(f"the option {name} is given twice, or is empty")
        found[name] = _decoded(value)
    return found


def _decoded(text: str) -> str:
    """Decode % escapes. Raises for any other %: a password must not be changed in silence."""
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise ConfigError(f"a % begins no escape; {_ESCAPES}")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError("an escape is no UTF-8") from None


def _login(userinfo: str, given: bool, options: dict[str, str]) -> Login:
    user, colon, password = userinfo.partition(":")
    if not given:
        return _pair(options.get("username"), options.get("password"))
    if not colon or not password:
        raise ConfigError(
            "there is a user without a password; write user:password@host, or :password@host"
        )
    if "username" in options or "password" in options:
        raise ConfigError("user or password is given twice: before the host and as an option")
    return Login(_decoded(user) or None, _decoded(password))


def _pair(user: str | None, password: str | None) -> Login:
    if user is not None and password is None:
        raise ConfigError("there is a user without a password; give both")
    return Login(user, password)


def _tls(options: dict[str, str], on: bool) -> Tls | None:
    if not on:
        if any(name in _TLS for name in options):
            raise ConfigError("options that begin with ssl_ are for rediss:// and valkeys:// only")
        return None
    verify = options.get("ssl_cert_reqs", "required")
    host = options.get("ssl_check_hostname", "true").lower()
    if verify not in ("required", "none") or host not in _FLAGS:
        raise ConfigError("ssl_cert_reqs is required or none, ssl_check_hostname is true or false")
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    if key is not None and certificate is None:
        raise ConfigError("ssl_keyfile is given without ssl_certfile")
    return Tls(options.get("ssl_ca_certs"), certificate, key, verify == "required", _FLAGS[host])


def _seeds(hosts: str, kind: Kind) -> tuple[Address, ...]:
    found = [_HOST.fullmatch(each) for each in hosts.split(",")]
    default = SENTINEL_PORT if kind == "sentinel" else PORT
    seeds = tuple(
        dict.fromkeys(
            (one[1].strip("[]"), int(one[2] or default)) for one in found if one is not None
        )
    )
    if None in found or any(not 0 < port < 65536 for _, port in seeds):
        raise ConfigError(
            "a host cannot be read, or its port is not a number from 1 to 65535; "
            f"{_ESCAPES}; expected {EXPECTED}"
        )
    if len(seeds) > 1 and kind == "server":
        raise ConfigError(
            "there are several hosts; write redis+cluster:// for a cluster, "
            "or redis+sentinel://host:port,host:port/service for Sentinel"
        )
    if len(seeds) > MOST_SEEDS:
        raise ConfigError(f"there are {len(seeds)} hosts; {MOST_SEEDS} are enough to begin with")
    return seeds


def _path(path: str, kind: Kind, options: dict[str, str]) -> tuple[str, int]:
    parts = path.strip("/").split("/")
    if kind == "sentinel":
        service, database = parts[0], parts[1:]
        if not _SERVICE.fullmatch(service) or len(database) > 1:
            raise ConfigError(
                "Sentinel needs the service's name: redis+sentinel://host:port/service or "
                ".../service/0"
            )
        return service, _database(database[0] if database else "", options)
    number = _database("/".join(parts), options)
    if kind == "cluster" and number:
        raise ConfigError("a cluster has no database numbers; remove it")
    return "", number


def _database(text: str, options: dict[str, str]) -> int:
    if text and "db" in options:
        raise ConfigError("the database is given twice: behind the host and as the option db")
    text = text or options.get("db", "0")
    if not re.fullmatch("[0-9]{1,5}", text):
        raise ConfigError(f"the database is not a number; {_ESCAPES}; expected {EXPECTED}")
    return int(text)
