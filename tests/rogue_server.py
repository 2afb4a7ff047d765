"""Servers that are not what they should be: in a thread with a script, or as a process of another
user.

``python -m tests.rogue_server MODE SOCKET UID [TOKEN]`` becomes user ``UID``, listens, says
``ready`` and greets whoever comes: MODE ``sealed`` as a server does, ``unsealed`` with memory that
anybody can shorten. With TOKEN it proves that it has that token.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from kvtier.client.connect import Address
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.wire import server_proof
from tests.server_process import LAYOUT, SLOT

SLOTS = 8
NOBODY = 65534


@contextmanager
def rogue(where, script):
    """Runs ``script`` with each client of a Unix socket, or of a port of loopback, until the end of
    the context."""
    listener = (
        socket.create_server(("127.0.0.1", 0)) if where is None else socket.socket(socket.AF_UNIX)
    )
    clients: list[socket.socket] = []
    if where is not None:
        listener.bind(str(where))
        listener.listen()

    def one(client):
        with client, contextlib.suppress(OSError):
            script(client)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                clients.append(listener.accept()[0])
                threading.Thread(target=one, args=(clients[-1],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield (
            Address(str(where), "", 0)
            if where is not None
            else Address("", *listener.getsockname())
        )
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)


def hear(client, inbox):
    """The next message. Raises ConnectionResetError when there is none any more."""
    while (message := inbox.next()) is None:
        count = client.recv_into(inbox.room())
        if not count:
            raise ConnectionResetError
        inbox.filled(count)
    return message


def greet(client, pool=None, *, fd=None, token=None):
    """Lets a client in, as a server does. ``pool``: what it may map, ``fd`` instead of its
    descriptor."""
    challenge = wire.Challenge(wire.VERSION, os.urandom(32))
    client.sendall(wire.frame(challenge))
    hello = hear(client, Inbox(wire.Hello, wire.MAX_GREETING_BYTES))
    assert isinstance(hello, wire.Hello)
    proof = b"" if token is None else server_proof(token, challenge, hello)
    if pool is None:
        client.sendall(wire.frame(wire.Welcome(SLOTS, SLOT, ["ram"], SLOTS, proof)))
        return
    ours, theirs = os.pipe()
    said = wire.frame(wire.Welcome(pool.slots, pool.slot_bytes, ["ram"], pool.slots, proof))
    socket.send_fds(client, [said], [pool.fd if fd is None else fd, theirs])
    os.close(theirs)
    os.close(ours)


def unsealed():
    """A region as large as that of a pool, which anybody can shorten."""
    fd = os.memfd_create("rogue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SLOTS * SLOT + 4096)
    return fd


@contextmanager
def rogue_process(mode, where, uid=0, token=None):
    """One in a process of its own, of user ``uid``."""
    words = [mode, str(where), str(uid), *([token.decode()] if token is not None else [])]
    command = [sys.executable, "-m", "tests.rogue_server", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def main(mode, where, uid, token):
    os.setgid(uid)
    os.setuid(uid)
    pool = Pool(SLOTS, SLOT)
    fd = unsealed() if mode == "unsealed" else None

    def script(client):
        greet(client, pool, fd=fd, token=token)
        inbox: Inbox[wire.Message] = Inbox(wire.Question)
        while True:
            asked = hear(client, inbox)
            if isinstance(asked, wire.LookupCall):
                there = len(asked.keys) // len(LAYOUT.keys([0])[0])
                client.sendall(wire.frame(wire.LookupReply(asked.id, [(there, 0.0)])))

    with rogue(Path(where), script):
        os.chmod(where, 0o777)  # noqa: S103 - whoever may, shall come in
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], given[1], int(given[2]), given[3].encode() if len(given) > 3 else None)
