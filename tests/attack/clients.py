"""Clients that may be there, and want more than is theirs: floods, crowds, other sizes, streams
that stop, other tenants."""

import os
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

from msgspec import structs

from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, enter, hello, join
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.errors import KVTierError
from kvtier.protocol import wire
from kvtier.testing import content
from tests.child_process import DEADLINE_S
from tests.server_process import LAYOUT, SLOT, attached, run, save

_AT_ONCE = 100
_WELCOME_S = 10.0
SHORT = SLOT - 4095
_CROWD = """
import select, socket, sys
host, port, count, again = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "again"
poll, sockets = select.epoll(), {}
def begin():
    one = socket.socket()
    one.bind((host, 0))
    one.connect(("127.0.0.1", port))
    sockets[one.fileno()] = one
    poll.register(one, select.EPOLLRDHUP)
for _ in range(count):
    begin()
print("ready", flush=True)
while True:
    for number, _ in poll.poll():
        poll.unregister(number)
        sockets.pop(number).close()
        if again:
            begin()
"""


def far(port, size=SLOT):
    own = hello(LAYOUT.fingerprint, size, stream=True)
    return ServerAccess(Address("", "127.0.0.1", port), own)


def enter_raw(access):
    """A socket past its greeting, without pool and witness."""
    welcomed = enter(access)
    for descriptor in welcomed.descriptors:
        os.close(descriptor)
    welcomed.socket.settimeout(DEADLINE_S)
    return welcomed.socket


@contextmanager
def silent_crowd(port, host, count, again=False):
    """``count`` sockets of a process that say nothing. ``again``: each that is closed is opened
    anew."""
    words = [
        sys.executable,
        "-c",
        _CROWD,
        host,
        str(port),
        str(count),
        "again" if again else "once",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def handshakes(port, *, every_s, seconds):
    """Begin TLS handshakes, with one first message made before, and wait for no answer."""
    first, begun = ssl.MemoryBIO(), list[socket.socket]()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), first).do_handshake()
    message, until = first.read(), time.monotonic() + seconds
    with ExitStack() as stack:
        while time.monotonic() < until:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            begun.append(one)
            for late in begun[-2:-1]:
                with suppress(OSError):
                    late.send(message)
            time.sleep(every_s)
    return len(begun)


def questions(access, keys, *, sessions, seconds):
    """Look these up without waiting for an answer."""
    asking, until = wire.frame(wire.LookupCall(1, wire.joined(keys))), time.monotonic() + seconds
    with ExitStack() as stack:
        sent = {stack.enter_context(enter_raw(access)): 0 for _ in range(sessions)}
        for one in sent:
            one.setblocking(False)
        while time.monotonic() < until and sent:
            for one in list(sent):
                try:
                    sent[one] += one.send(asking[sent[one] % len(asking) :])
                    one.recv(1 << 16)
                except BlockingIOError:
                    continue
                except OSError:
                    del sent[one]


def greetings(access, sizes):
    """Greet with chunks of each of these sizes, and leave at once. Returns those welcomed."""
    welcomed = []
    for size in sizes:
        with suppress(KVTierError, OSError):
            enter(of_size(access, size), _WELCOME_S).socket.close()
            welcomed.append(size)
    return welcomed


def of_size(access, size):
    return replace(access, hello=structs.replace(access.hello, chunk_bytes=size))


@contextmanager
def half_sent(access, keys):
    """Begin to send each of these chunks on a stream of its own, and stop after the first byte.
    Yields how many got a slot."""
    with ExitStack() as stack:
        got = 0
        for key in keys:
            with suppress(OSError, KVTierError):
                sock = stack.enter_context(enter_raw(access))
                sock.sendall(wire.frame(wire.Put(1, key)))
                if sock.recv(100) == wire.frame(wire.Go(1, True, False)):
                    sock.sendall(b"\0")
                    got += 1
        yield got


@contextmanager
def workers_of_one(server, port, count):
    """Steer, and join as so many workers of this host. Yields the descriptors that came."""
    with ExitStack() as stack:
        own = hello(LAYOUT.fingerprint, SLOT, stream=False, steers=True)
        steering = enter(ServerAccess(Address("", "127.0.0.1", port), own))
        stack.enter_context(steering.socket)
        got = list[int]()
        for _ in range(count):
            with suppress(KVTierError, OSError):
                joined = join(server, None, steering.welcome.ticket, _WELCOME_S)
                joined.socket.close()
                for descriptor in joined.descriptors:
                    stack.callback(os.close, descriptor)
                got += joined.descriptors
        yield got


def ends_of_others(server, port, keys):
    """Save a chunk of its own under each of these keys that ends 4,095 bytes before its slot does,
    by a stream and as a worker in turns, and read them as whole slots. Returns the bytes of
    others."""
    with ExitStack() as stack:
        writer, reader = (
            stack.enter_context(closing(RemoteTier(far(port, size)))) for size in (SHORT, SLOT)
        )
        near = stack.enter_context(attached(of_size(server, SHORT)))
        found = 0
        for number, key in enumerate(keys):
            if number % 2:
                writer.write(key, content(key, SHORT))
            else:
                with near.save([key]) as lease:
                    for view in lease.views():
                        view[:SHORT] = content(key, SHORT)
                    lease.commit()
                near.stats()
            found += behind(reader, key)
        return found


def behind(reader, key):
    """How many bytes behind such a chunk are not zero."""
    into = memoryview(bytearray(b"\xaa" * SLOT))
    assert reader.read(key, into), "it is not held"
    assert into[:SHORT] == content(key, SHORT)
    return SLOT - SHORT - bytes(into[SHORT:]).count(0)


def clears(near, stream, known):
    """Drop ``known``, of which it knows the names, by every call that makes a server forget, then
    all chunks that there are, as vLLM's ``/reset_prefix_cache`` does."""
    with closing(RemoteTier(stream)) as tier:
        tier.write(known[0], memoryview(bytes(SLOT)))
        for key in known:
            tier.delete(key)
    with attached(near) as client:
        client.invalidate(known)
        client.invalidate_all()
        client.stats()  # the others have no answer, and this one comes after them


def fills(access, chunks):
    with attached(access) as client:
        return sum(
            save(client, run(1_000_000 + first, min(_AT_ONCE, chunks - first)))
            for first in range(0, chunks, _AT_ONCE)
        )


def guesses(access, tokens, salts):
    """Look for a prompt whose text it knows under each of these salts. Returns the chunks found."""
    with closing(Client(access, 2.0)) as client:
        return sum(client.lookup(LAYOUT.keys(tokens, salt)).known for salt in salts)
