"""``kvtier serve``: configuration -> listeners and stores -> a Server until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import ssl
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from kvtier import selftest
from kvtier.assemble import assemble, secret_key
from kvtier.chunk import ChunkLayout, fingerprint
from kvtier.config import Config, load
from kvtier.dial import Address, read_token
from kvtier.errors import ConfigError
from kvtier.extras import how
from kvtier.listen import Listener, listen_tcp, listen_unix, server_tls
from kvtier.server import Beside, Server, serve
from kvtier.store import Store

logger = logging.getLogger("kvtier.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="YAML", help="configuration file; beats KVTIER_CONFIG_FILE")
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        action="append",
        help="unix:///path or tcp://host:port; may be given again; default: the key 'server'",
    )
    parser.add_argument("--insecure", action="store_true", help="serve TCP on loopback without token or TLS")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM. Exit status 1 when something was dropped at the end."""
    config = load(arguments.config)
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    addresses = arguments.listen or ([config.server] if config.server else [])
    if not addresses:
        raise ConfigError("nowhere to listen: give --listen unix:///path/kvtier.sock, or the key 'server'")
    token = read_token(config.server_token_file) if config.server_token_file else None
    if config.self_test:
        selftest.at_start(replace(config, server=None))
    secret_key(config)  # a key that is none stops the server, not the first engine that comes
    beside = admin_surface(config)  # first: who can attach can ask, too
    listeners = _listeners(config, addresses, token is not None, arguments.insecure)
    opener = partial(open_store, config)
    make = lambda: Server(opener, listeners, token=token, realms=config.server_realms)  # noqa: E731
    return 0 if serve(make, beside) else 1


def admin_surface(config: Config) -> Beside:
    """What serves ``config.admin``. Where nobody asked for it, a port that is taken (by the admin surface of another
    server on this host) or a library that is missing costs the surface and not the server: a cache must not fail for
    its gauges. Asked for by name, it is a ConfigError."""
    if config.admin == "off":
        return lambda server: nullcontext()
    try:
        return _admin_surface(config)
    except ConfigError as error:
        if "admin" in config.sources:
            raise
        logger.warning("no admin surface: %s", error)
        return lambda server: nullcontext()


def _admin_surface(config: Config) -> Beside:
    try:
        from kvtier.admin import beside, bind
    except ImportError as error:
        raise ConfigError(f"admin={config.admin}: {error}; {how('server')}, or set admin=off") from error
    secret = config.admin_token_file
    token = read_token(secret, "admin_token_file") if secret else None
    port = bind(config.admin, token=token is not None, tls=_tls(config) if config.admin.startswith("https") else None)
    return lambda server: beside(server, port, token, config.nvme_path)


def open_store(config: Config, slot_bytes: int) -> Store:
    """The Store of one realm: its part of RAM, and of NVMe in a folder of its own; in Redis it is one with the realms
    of other servers that have the same slot size. Raises ConfigError or TierError."""
    parts = config.server_realms
    if parts > 1 and (config.ram_bytes is None or (config.nvme_path is not None and config.nvme_bytes is None)):
        raise ConfigError(f"server_realms={parts} divides ram_bytes and nvme_bytes: give them as numbers")
    own = replace(
        config,
        server=None,
        ram_bytes=config.ram_bytes and config.ram_bytes // parts,
        nvme_bytes=config.nvme_bytes and config.nvme_bytes // parts,
        nvme_write_limit=config.nvme_write_limit and max(1, config.nvme_write_limit // parts),
        nvme_path=config.nvme_path and f"{config.nvme_path}/slots-{slot_bytes}",
    )
    layout = ChunkLayout(fingerprint({"server": slot_bytes}), 1, 1, (slot_bytes,))
    store = assemble(own, layout)
    assert isinstance(store, Store)
    return store


def _listeners(config: Config, addresses: Sequence[str], token: bool, insecure: bool) -> list[Listener]:
    """All or none."""
    listeners: list[Listener] = []
    with ExitStack() as undo:
        for text in addresses:
            address = Address.parse(text)
            if address.path:
                listener = listen_unix(address)
            else:
                listener = listen_tcp(address, token=token, tls=_tls(config), insecure=insecure)
            undo.callback(listener.close)
            listeners.append(listener)
        undo.pop_all()
    return listeners


def _tls(config: Config) -> ssl.SSLContext | None:
    if config.server_cert is None or config.server_key is None:
        if config.server_cert or config.server_key or config.server_ca:
            raise ConfigError("TLS at a server needs both server_cert and server_key")
        return None
    return server_tls(config.server_cert, config.server_key, config.server_ca)
