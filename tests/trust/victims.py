"""Processes to be killed, forked from one that has imported everything: a start takes a hundredth
of a second.

They are the product's own (``kvtier serve`` through its command line, engines with a Client or with
a Store of their own under the load of :mod:`tests.engine_process`), with real files and sockets,
each with a process id of its own.
"""

import logging
import os
import select
from pathlib import Path

from tests.child_process import DEADLINE_S
from tests.engine_process import churn, client_at
from tests.forked import FORK, Forked
from tests.server_process import LAYOUT


class Engine:
    """An engine under load, and what it says: see :mod:`tests.engine_process`.

    ``place``: the socket of a server, or the configuration of a store of its own.
    """

    def __init__(self, place, seed):
        self._ear, mouth = FORK.Pipe(duplex=False)
        self._process = Forked(_engine, place, seed, mouth)
        mouth.close()
        self.pid = self._process.pid

    def hear(self, count=1):
        """The next letters, at least ``count``. AssertionError when it says nothing or has died by
        itself."""
        heard = b""
        while len(heard) < count:
            ready, _, _ = select.select([self._ear], [], [], DEADLINE_S)
            assert ready, "an engine hangs"
            more = os.read(self._ear.fileno(), max(1, count - len(heard)))
            assert more, f"an engine ended with status {self._process.wait(DEADLINE_S)}"
            heard += more
        return heard

    def hear_until(self, letter):
        """Read on until it says ``letter``. What it said before this call does not count."""
        while select.select([self._ear], [], [], 0)[0]:
            self.hear()
        while self.hear() != letter:
            pass

    def kill(self):
        """Send SIGKILL. AssertionError when it had ended by itself."""
        ended = self._process.poll()
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._ear.close()
        assert ended is None, f"an engine ended with status {ended}"


def _engine(place, seed, mouth):
    os.dup2(mouth.fileno(), 1)
    logging.getLogger("kvtier").setLevel(
        logging.CRITICAL + 1
    )  # that it loses its server is why it is here
    if isinstance(place, Path):
        churn(client_at(str(place)), seed)
        return
    from kvtier.assemble import assemble
    from kvtier.config.keys import Config
    from kvtier.started import Started

    churn(assemble(Started(Config().with_keys(**place)), LAYOUT), seed)
