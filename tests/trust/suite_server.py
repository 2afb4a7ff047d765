"""Runs a suite of pytest again and again in forks of one process that has imported pytest and
Hypothesis, and none of kvtier: ``python -m tests.trust.suite_server SOCKET SECONDS WORDS...``

A client of SOCKET gets ``0`` when the suite with the arguments WORDS has passed. When it
has failed, or has taken longer than SECONDS, the connection ends. :data:`CLIENT` does that.
"""

import os
import signal
import socket
import sys

CLIENT = (
    "import socket, sys; asked = socket.socket(socket.AF_UNIX); asked.connect(sys.argv[1]); "
    "sys.exit(asked.recv(1) != b'0')"
)
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""pytest warns where a plugin, such as Hypothesis, was imported before it began."""


def main():
    import hypothesis.strategies  # noqa: F401 - so that forks have it
    import pytest

    place, seconds, *words = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen()
        os.rename(f"{place}.new", place)  # now it can be asked
        while True:
            asked, _ = listener.accept()
            with asked:
                pid = os.fork()
                if not pid:
                    signal.alarm(int(seconds))
                    if pytest.main([*_QUIET, *words]) == 0:
                        asked.send(b"0")
                    os._exit(0)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
