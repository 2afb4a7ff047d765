"""A server on the test's own loop: nothing is served while the test does not wait."""

import asyncio
from contextlib import asynccontextmanager

from kvtier.client.connect import Address
from kvtier.server.listeners import listen_tcp, listen_unix
from kvtier.server.server import Server
from tests.child_process import DEADLINE_S
from tests.server_process import short_folder


@asynccontextmanager
async def served(store):
    with short_folder() as folder:
        tcp = Address("", "127.0.0.1", 0)
        listeners = [
            listen_unix(Address(str(folder / "sock"), "", 0)),
            listen_tcp(tcp, token=False, tls=None, insecure=True),
        ]
        server = Server(lambda slot_bytes: store, listeners)
        await server.start()
        async with asyncio.timeout(DEADLINE_S):
            yield server
        assert await server.stop()


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - of the server's state, which has no event
            await asyncio.sleep(0)
