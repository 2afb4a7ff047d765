"""A server on a real socket that answers each of Redis's commands with what a test says."""

import socket
import threading
from collections.abc import Callable
from contextlib import closing, contextmanager

Answer = bytes | Callable[[socket.socket], None]
INFO = b"redis_version:7\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
WELL: dict[bytes, bytes] = {
    b"AUTH": b"+OK\r\n",
    b"SELECT": b"+OK\r\n",
    b"INFO": b"$%d\r\n%s\r\n" % (len(INFO), INFO),
    b"SET": b"+OK\r\n",
    b"GET": b"$-1\r\n",
    b"EXISTS": b":0\r\n",
    b"UNLINK": b":0\r\n",
    b"OBJECT": b":1\r\n",
    b"SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
}


@contextmanager
def scripted(answers):
    """The port of a server that answers as in ``answers``, else as a Redis that holds nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    clients: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(client):
        with closing(client):
            try:
                while asked := client.recv(1 << 16):
                    for name in words(asked):
                        answer = answers.get(name, WELL.get(name, b"+OK\r\n"))
                        if callable(answer):
                            answer(client)
                        else:
                            client.sendall(answer)
            except OSError:
                return

    def accept():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            clients.append(client)
            threads.append(threading.Thread(target=serve, args=(client,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for client in clients:
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in threads:
            thread.join()


def words(asked):
    lines = asked.split(b"\r\n")
    return [
        lines[at + 2]
        for at, line in enumerate(lines[:-2])
        if line[:1] == b"*" and line[1:].isdigit()
    ]


def bulk(text):
    told = text.encode() if isinstance(text, str) else text
    return b"$%d\r\n%s\r\n" % (len(told), told)


def cluster_slots(*ports):
    """The reply to CLUSTER SLOTS of nodes on this host that share the slots evenly, in this
    order."""
    size = 16384 // len(ports)
    lines = b""
    for index, port in enumerate(ports):
        last = 16383 if index + 1 == len(ports) else (index + 1) * size - 1
        lines += b"*3\r\n:%d\r\n:%d\r\n*2\r\n%s:%d\r\n" % (
            index * size,
            last,
            bulk("127.0.0.1"),
            port,
        )
    return b"*%d\r\n" % len(ports) + lines


def primary(port):
    return b"*2\r\n" + bulk("127.0.0.1") + bulk(str(port))
