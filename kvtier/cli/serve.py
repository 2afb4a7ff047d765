"""``kvtier serve``: configuration -> listeners and stores -> a Server until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec

from kvtier.admin.forms import Configuration
from kvtier.admin.status import EngineIndex, trouble
from kvtier.assemble import Lent, assemble_store, write_budgets
from kvtier.autoconfig.explain import configuration_text
from kvtier.autoconfig.start import sized
from kvtier.cli.key_flags import add_key_flags, given_keys
from kvtier.client.connect import Address, read_token
from kvtier.config.keys import Config, ServerSection, describe, tell
from kvtier.config.load import load
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, KVTierError, TierError
from kvtier.core.extras import how
from kvtier.core.processes import environment
from kvtier.core.secret_files import read_secret
from kvtier.server.extension import noticing_recovery, running, server_extensions
from kvtier.server.listeners import (
    Listener,
    Notifier,
    listen_tcp,
    listen_unix,
    server_tls,
)
from kvtier.server.server import Beside, Server, serve
from kvtier.started import Started
from kvtier.store.observer import Observer
from kvtier.store.observers.record import Recorder, RecordFolder, RecordWriter
from kvtier.store.store import Store
from kvtier.tiers.nvme.check import discard
from kvtier.tiers.nvme.disks import SIZE_FOLDERS
from kvtier.tiers.nvme.folder import below
from kvtier.tiers.nvme.parts import NvmeSection

logger = logging.getLogger("kvtier.server")

_SWITCH_S = 0.0005
"""Time that a lane may run Python while the loop waits. Python's own 5 ms are five turns of it."""
_LOOK_AGAIN_S = 5.0
_RECORD_S = 0.25
"""Time between writes of the record, so that many notes are written at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="YAML", help="configuration file; beats KVTIER_CONFIG_FILE")
    help_text = (
        "unix:///path or tcp://host:port; may be given again; default: the key server.address"
    )
    add("--listen", metavar="ADDRESS", action="append", help=help_text)
    add("--insecure", action="store_true", help="serve TCP on loopback without token or TLS")
    parser.usage = "kvtier serve [--config YAML] --listen ADDRESS [--insecure] [--KEY VALUE ...]"
    add_key_flags(parser, "server")


def run(arguments: argparse.Namespace) -> int:
    flags = given_keys(arguments)
    config = load(arguments.config, flags=flags)
    logging.basicConfig(
        level=config.engine.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    tell(config.remarks)
    addresses = arguments.listen or config.server.addresses[:1]
    if not addresses:
        raise ConfigError(
            "nowhere to listen: give --listen unix:///path/kvtier.sock, or the key server.address"
        )
    started = Started(sized(config))
    config, token = started.config, started.token
    logger.info("configuration: %s", configuration_text(config))
    slot_bytes, sizes = config.server.slot_bytes, kept_sizes(config.nvme)
    if slot_bytes is None and not sizes:
        logger.info(
            "slot_bytes is not set: the first engine decides it, and the pool and the tiers are "
            "made then"
        )
    away = started.try_server_start()
    extensions = server_extensions(config)
    observers, recording = recorded(config.engine.record)
    indexes = (each for each in extensions if isinstance(each, EngineIndex))
    engines = next(indexes, EngineIndex())
    surface = admin_surface(config, engines)  # before listening: who can attach can ask, too
    listeners = _listeners(started, addresses, arguments.insecure)
    beside = (recording, surface, *(each.beside for each in extensions))
    opener, closer = Stores(started, observers), partial(discard_closed, config.nvme)
    sys.setswitchinterval(_SWITCH_S)
    notifier = Notifier(environment())
    clean = asyncio.run(
        serve(
            lambda: Server(opener, listeners, token=token, discard=closer),
            partial(_beside, started, beside, away),
            lambda server: notifier.serving(partial(status_text, server)),
            (slot_bytes, sizes),
        )
    )
    return 0 if clean else 1


def status_text(server: Server) -> str:
    return "; ".join([f"{len(server.connections)} connections", *trouble(server)])


@asynccontextmanager
async def _beside(
    started: Started, surfaces: Sequence[Beside], away: Mapping[str, str], server: Server
) -> AsyncIterator[None]:
    for name, why in away.items():
        server.trouble[name] = (
            f"{name} cannot be reached: its chunks are misses until it can; the log says more"
        )
        logger.warning("%s", why)
    looks = (_look_again(started, server, name) for name in away)
    async with running(noticing_recovery(server), *looks), AsyncExitStack() as stack:
        for surface in surfaces:
            await stack.enter_async_context(surface(server))
        yield


async def _look_again(started: Started, server: Server, name: str) -> None:
    """Retry until a tier can be used, on the lane where stores are opened, which is mostly idle."""
    said = ""
    while name in server.trouble:
        await asyncio.sleep(_LOOK_AGAIN_S)
        try:
            looking = server.size_classes.on_lane(started.looks()[name])
            why = await asyncio.shield(asyncio.wrap_future(looking))
        except KVTierError as error:
            why = str(error)
        if not why:
            del server.trouble[name]
            logger.info("%s can be reached now", name)
        elif why != said:
            logger.warning("%s", why)
        said = why


def recorded(record: str | None) -> tuple[tuple[Observer, ...], Beside]:
    """Make the observer and the writer of a record in the folder ``record``. Raises ConfigError,
    and ModuleNotFoundError without the extra ``server``."""
    if record is None:
        return (), lambda server: nullcontext()
    from aiofiles.os import wrap

    folder = RecordFolder(Path(record))
    recorder = Recorder(folder.salt)
    writer = RecordWriter(recorder, folder)
    write_all, close = wrap(writer.write_all), wrap(writer.close)

    async def write_until(over: asyncio.Event, trouble: dict[str, str]) -> None:
        while not over.is_set():
            await write_all()
            if writer.trouble:
                trouble["record"] = writer.trouble
            else:
                trouble.pop("record", None)
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _RECORD_S)

    @asynccontextmanager
    async def recording(server: Server) -> AsyncIterator[None]:
        over = asyncio.Event()
        writing = asyncio.create_task(write_until(over, server.trouble))
        try:
            yield
        finally:
            over.set()
            await writing
            await close()

    return (recorder,), recording


def admin_surface(config: Config, engines: EngineIndex) -> Beside:
    """Make the server of the key ``admin``. A taken port or a missing library is a ConfigError if
    the interface was asked for by name. Else it is trouble and a port is tried again: a cache must
    not fail for its gauges."""
    admin = config.admin
    if admin.address == "off":
        if admin.engines is not None:
            raise ConfigError("admin=off and admin_engines: lookup is a part of admin; set admin")
        return lambda server: nullcontext()
    make = partial(_admin_surface, config, engines)
    try:
        return make()
    except ConfigError as error:
        if "address" in admin.sources or admin.engines is not None:
            raise
        logger.warning("no admin interface: %s", error)
        return partial(_surface_later, make, str(error))


@asynccontextmanager
async def _surface_later(
    make: Callable[[], Beside], why: str, server: Server
) -> AsyncIterator[None]:
    server.trouble["admin"] = f"no admin interface: {why}"
    async with running(_try_surface(make, server)):
        yield


async def _try_surface(make: Callable[[], Beside], server: Server) -> None:
    while True:
        await asyncio.sleep(_LOOK_AGAIN_S)
        with suppress(ConfigError):
            async with make()(server):
                del server.trouble["admin"]
                await asyncio.Event().wait()


def _admin_surface(config: Config, engines: EngineIndex) -> Beside:
    admin = config.admin
    try:
        from kvtier.admin.http import Around, beside
        from kvtier.admin.places import bind
    except ImportError as error:
        raise ConfigError(
            f"admin={admin.address}: {error}; {how('server')}, or set admin=off"
        ) from error
    token = read_token(admin.token_file, "admin_token_file") if admin.token_file else None
    tls = _tls(config.server) if admin.address.startswith("https") else None
    port = bind(admin.address, token=token is not None, tls=tls)
    rows = [row._asdict() | {"key": row.path} for row in describe(config)]
    configuration = msgspec.convert({"keys": rows}, Configuration)
    around = Around(config.nvme.folders(), configuration, engines)
    return lambda server: beside(server, port, token, around)


class Stores:
    """Opener of size classes' Stores, each with all of RAM and its own NVMe folder. Redis' chunks
    are shared with other servers' classes of the same slot size. For one thread."""

    def __init__(self, started: Started, observers: tuple[Observer, ...] = ()) -> None:
        self._started, self._observers = started, observers
        self._writes = write_budgets(started.tiers, threading.Lock())

    def __call__(self, slot_bytes: int, lent: bool = False) -> Store:
        """Open a Store. ``lent``: other sizes have the room. Raises ConfigError or TierError."""
        own = self._started.for_slots(slot_bytes)
        if slot_bytes != own.config.server.slot_bytes:
            logger.info(
                "chunks of %d bytes are new here: with slot_bytes=%dB they are ready at the start",
                slot_bytes,
                slot_bytes,
            )
        layout = ChunkLayout(fingerprint({"server": slot_bytes}), 1, 1, (slot_bytes,))
        return assemble_store(own, layout, shared=Lent(lent, self._writes, self._observers))


def kept_sizes(nvme: NvmeSection) -> list[int]:
    """Find the slot sizes of older folders in ``nvme_path``, the one used last first."""
    folders = [folder for place in nvme.folders() for folder in below(place, SIZE_FOLDERS) or ()]
    found = [folder for folder in folders if folder.name.removeprefix("slots-").isdecimal()]
    found.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    return list(dict.fromkeys(int(folder.name.removeprefix("slots-")) for folder in found))


def discard_closed(nvme: NvmeSection, slot_bytes: int) -> None:
    """Remove a closed size class's NVMe folder. Best effort: one in use is somebody else's."""
    for folder in nvme.folders():
        with suppress(TierError):
            discard(folder / f"slots-{slot_bytes}")


def _listeners(started: Started, addresses: Sequence[str], insecure: bool) -> list[Listener]:
    listeners: list[Listener] = []
    with ExitStack() as undo:
        for text in addresses:
            address = Address.parse(text)
            if address.path:
                try:
                    listener = listen_unix(address)
                except PermissionError as error:
                    raise ConfigError(
                        f"{text}: {error.filename}: {error.strerror}. Root or systemd may make it; "
                        "a user has unix://$XDG_RUNTIME_DIR/kvtier/kvtier.sock"
                    ) from error
            else:
                keys = started.config.server
                listener = listen_tcp(
                    address,
                    token=started.token is not None,
                    tls=_tls(keys),
                    insecure=insecure,
                    unencrypted=keys.unencrypted,
                )
            undo.callback(listener.close)
            listeners.append(listener)
        undo.pop_all()
    return listeners


def _tls(keys: ServerSection) -> ssl.SSLContext | None:
    if keys.cert is None or keys.key_ is None:
        if keys.cert or keys.key_ or keys.ca:
            raise ConfigError("TLS at a server needs both server_cert and server_key")
        return None
    read_secret(keys.key_, "server_key")
    return server_tls(keys.cert, keys.key_, keys.ca)
