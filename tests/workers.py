"""Two workers at once (``make test``; pytest-xdist, ``--dist loadfile``), or three for tests of the
whole, which wait as long as they compute: a file's tests run in one of them and share its fixtures.
The longest files come first, so that all workers end at about the same time.

``make test`` leaves out tests of the whole that cost minutes or need more than ``.venv`` and
redis-server. They have the marker ``whole``, which :func:`mark_whole` gives them by their file.

A test marked ``alone`` has the host to itself: no other test runs meanwhile. It measures time, or
counts something of the whole host. Files with such tests come last, when no long test is left for
which it would wait.
"""

import fcntl
from contextlib import contextmanager
from pathlib import Path

LONGEST = (
    "tests/integration/test_vllm.py",
    "tests/trust/test_slice.py",
    "tests/integration/test_vllm_modes.py",
    "tests/trust/test_engine.py",
    "tests/integration/test_vllm_keys.py",
    "tests/integration/test_vllm_groups.py",
    "tests/integration/test_spans.py",
    "tests/integration/test_vllm_launch.py",
    "tests/integration/test_long_doc_qa.py",
    "tests/integration/test_vllm_events.py",
    "tests/integration/test_vllm_server.py",
    "tests/integration/test_lmcache.py",
    "tests/integration/test_warm.py",
)
"""Files with minutes of tests each, the longest first. Another order only costs time."""

WHOLE = (
    "tests/integration/",
    "tests/trust/test_engine.py",
    "tests/contract/test_mooncake_tier.py",  # it needs a peer, as the next three
    "tests/contract/test_object_tier.py",
    "tests/fault/test_mooncake_faults.py",
    "tests/fault/test_object_faults.py",
)
"""Where ``make test`` runs only what has the marker ``core``, and :data:`DECIDING`."""
DECIDING = ("tests/integration/test_examples.py", "tests/integration/test_server.py")


def mark_whole(items):
    for item in items:
        name = item.nodeid.partition("::")[0]
        is_whole = name.startswith(WHOLE) and name not in DECIDING
        if is_whole and not item.get_closest_marker("core"):
            item.add_marker("whole")


def in_order(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    late = {item.path for item in items if item.get_closest_marker("alone")}

    def rank(item):
        name = item.nodeid.partition("::")[0]
        return item.path in late and name not in ranks, ranks.get(name, len(ranks))

    return sorted(items, key=rank)


@contextmanager
def turn(item):
    """A test's turn on the host, beside other workers' tests or alone. Waits for it."""
    if not hasattr(item.config, "workerinput"):  # one process runs all tests
        yield
        return
    alone = item.get_closest_marker("alone") is not None
    run = Path(item.config.getoption("basetemp")).parent
    with (run / "gate").open("a") as gate, (run / "host").open("a") as host:
        # One that waits for the host keeps the gate shut: those that share the host do not pass it.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(host, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(host, fcntl.LOCK_UN)  # processes that the test forked may have it open too
