"""A hostile Redis Cluster: its map names many nodes, and each of them is slow."""

import time
from contextlib import ExitStack, contextmanager

from tests.scripted_redis import INFO, Answer, bulk, cluster_slots, scripted


class Asked:
    """How often nodes were asked for what they are (INFO), and for what they hold (SCAN)."""

    def __init__(self):
        self.info = self.scan = 0


@contextmanager
def slow_cluster(nodes, delay=lambda: time.sleep(0.8)):
    """The URL of a cluster whose every answer to INFO and SCAN comes after ``delay``. At most 300
    nodes."""
    asked = Asked()

    def info(client):
        asked.info += 1
        delay()
        client.sendall(bulk(INFO))

    def scan(client):
        asked.scan += 1
        delay()
        client.sendall(b"*2\r\n" + bulk("0") + b"*0\r\n")

    answers: dict[bytes, Answer] = {b"INFO": info, b"SCAN": scan}
    with ExitStack() as stack:
        ports = [stack.enter_context(scripted(answers)) for _ in range(min(nodes, 300))]
        answers[b"CLUSTER"] = cluster_slots(*ports)
        yield f"redis+cluster://127.0.0.1:{ports[0]}", asked
