"""``kvtier serve`` in this process: what happens around the moment when it becomes ready."""

import asyncio
import os
import signal
import socket
import threading
import urllib.request
from contextlib import asynccontextmanager, nullcontext

import pytest

from kvtier.admin.status import EngineIndex
from kvtier.bench.processes.servers import free_port
from kvtier.cli import serve as starting
from kvtier.config.keys import Config
from kvtier.core.errors import ConfigError, KVTierError
from kvtier.server.server import Server, serve
from tests.child_process import DEADLINE_S, wait_for


def _opens_nothing(slot_bytes):
    raise ConfigError(f"nobody opens {slot_bytes}")


def test_a_start_that_takes_long_can_be_stopped():
    """SIGTERM while a store opens: the server ends, and was never ready."""
    gate, was_ready = threading.Event(), []

    def opens_late(slot_bytes):
        os.kill(os.getpid(), signal.SIGTERM)
        gate.wait(DEADLINE_S)
        raise ConfigError(f"too late for {slot_bytes}")

    @asynccontextmanager
    async def ready(server):
        was_ready.append(server)
        yield

    clean = asyncio.run(
        serve(
            lambda: Server(opens_late, ()),
            lambda server: nullcontext(),
            ready,
            (4096, ()),
            timeout_s=0.1,
        )
    )
    gate.set()
    assert (clean, was_ready) == (False, [])


def test_a_size_that_cannot_be_opened_ends_the_start():
    with pytest.raises(KVTierError, match="nobody opens 4096"):
        asyncio.run(
            serve(
                lambda: Server(_opens_nothing, ()),
                lambda _: nullcontext(),
                lambda _: nullcontext(),
                (4096, ()),
            )
        )


def test_a_port_that_is_taken_is_trouble_and_is_had_when_it_is_free(monkeypatch):
    monkeypatch.setattr(starting, "_LOOK_AGAIN_S", 0.01)
    port = free_port()
    config = Config().with_keys(
        admin=f"http://127.0.0.1:{port}"
    )  # of no source: nobody asked for this one
    asked = Config().with_keys({"admin": "flag"}, admin=config.admin.address)

    def health():
        url = f"http://127.0.0.1:{port}/healthz/live"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return int(answer.status)

    async def tried(holder):
        server = Server(_opens_nothing, ())
        async with starting.admin_surface(config, EngineIndex())(server):
            assert "cannot listen there" in server.trouble["admin"]
            holder.close()
            await asyncio.to_thread(
                wait_for, lambda: "admin" not in server.trouble, "the port is had"
            )
            assert await asyncio.to_thread(health) == 200
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(health)
        await server.stop()

    with socket.create_server(("127.0.0.1", port)) as holder:
        with pytest.raises(ConfigError, match="cannot listen there"):
            starting.admin_surface(asked, EngineIndex())
        asyncio.run(tried(holder))
