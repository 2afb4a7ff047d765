"""Whoever leaves takes nothing along: a size class counts its connections, of every mode, and
closes only without any."""

import asyncio
import socket
from contextlib import closing

import pytest

from kvtier.client.connect import ServerAccess, enter, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.pool import Pool
from kvtier.store.store import Store
from tests.child_process import wait_for
from tests.loop_server import served
from tests.server_process import LAYOUT, SLOT, attached, run, save

pytestmark = pytest.mark.usefixtures("patient")


@pytest.mark.parametrize("mode", ["attach", "stream", "steer", "refused", "silent"])
def test_a_connection_that_has_ended_is_counted_no_more(mode):
    def work(near, far):
        if mode == "attach":
            own = hello(LAYOUT.fingerprint, SLOT, stream=False)
            with attached(ServerAccess(near, own)) as client:
                save(client, run(1, 2))
                client.load(run(1, 2))  # a lease that nobody ends
            return
        if mode == "silent":
            socket.create_connection((far.host, far.port)).close()
            return
        own = hello(LAYOUT.fingerprint, SLOT, stream=mode != "steer", steers=mode == "steer")
        access = ServerAccess(far, own)
        if mode == "stream":
            with closing(RemoteTier(access)) as tier:
                assert tier.find(run(1, 2)) == 0
            return
        sock = enter(access).socket
        if mode == "refused":
            sock.sendall(b"\xff" * 64)
        sock.close()

    async def scenario():
        store = Store(Pool(8, SLOT))
        async with served(store) as server:
            near, far = (one.address for one in server.listeners)
            size_class = await asyncio.wrap_future(server.size_classes.get(SLOT))
            await asyncio.to_thread(work, near, far)

            def gone():
                there = size_class.users or server.connections or server.lingering
                return bool(server.counts["ended"]) and not there

            await asyncio.to_thread(wait_for, gone, "all have left")
            assert size_class.subscribers == set()
            assert size_class.shares._shares == set()
            assert server.steered == {}
            assert not any(server.handshakes._under_way)
            store.check(idle=True)

    asyncio.run(scenario())
