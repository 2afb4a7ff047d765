"""A real Mooncake that goes away: master and pool killed, stopped and started anew. Each is a miss
or a refusal that is counted, in bounded time."""

import os
import signal
import time
from pathlib import Path

import pytest

from kvtier.tiers.breaker import OPENING_FAULTS
from tests.child_process import wait_for
from tests.clock import Clock
from tests.mooncake_pool import mooncake
from tests.tier_chunks import KEYS, chunk, holds

pytestmark = [pytest.mark.slow, pytest.mark.extended]

AT_MOST_S = 8.0
"""For one call: five seconds for the answer, and a busy machine."""


@pytest.fixture
def pool():
    with mooncake() as started:
        yield started


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(pool, clock):
    tier = pool.tier(clock=clock)
    assert tier.write(KEYS[0], chunk(KEYS[0]))
    yield tier
    tier.close()


def clients():
    """Processes of Mooncake's client that this process has started."""
    of_this_process = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = {int(pid) for file in of_this_process for pid in file.read_text().split()}
    return {
        pid for pid in pids if b"mooncake/child.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def left_alone(tier):
    """Each call takes a bounded time, until no call is made any more."""
    for turn in range(OPENING_FAULTS):
        begun = time.monotonic()
        assert not (turn % 2 and tier.write(KEYS[1], chunk(KEYS[1])))
        assert not holds(tier, KEYS[0])
        assert tier.find(KEYS) == 0
        assert time.monotonic() - begun < 3 * AT_MOST_S
    assert tier.open_breakers == 1
    assert not tier.may_read(KEYS[0])
    begun = time.monotonic()
    assert holds(tier, KEYS[0]) is None and not tier.write(KEYS[1], chunk(KEYS[1]))
    assert time.monotonic() - begun < 1, "nobody waits for it"


@pytest.mark.alone
def test_a_master_that_is_killed_is_misses_and_used_again_when_it_is_back(pool, tier, clock):
    pool.master.kill()
    left_alone(tier)
    pool.master.start()

    def written():
        clock.now += 60
        return tier.write(KEYS[2], chunk(KEYS[2]))

    wait_for(written, "the pool is lent again, and takes a chunk")
    assert holds(tier, KEYS[2]) and tier.open_breakers == 0


@pytest.mark.alone
def test_a_master_that_is_stopped_holds_no_call_for_long(pool, tier, clock):
    os.kill(pool.master.pid, signal.SIGSTOP)
    left_alone(tier)
    assert not clients(), "a client whose call took too long was ended"
    os.kill(pool.master.pid, signal.SIGCONT)
    clock.now += 60
    assert holds(tier, KEYS[0])
    assert tier.open_breakers == 0


def test_hosts_that_lend_and_are_killed_cost_their_chunks(pool, tier):
    pool.pool.kill()
    left_alone_or_gone = holds(tier, KEYS[0])
    assert left_alone_or_gone in (None, False)
    assert not tier.write(KEYS[1], chunk(KEYS[1]))


@pytest.mark.alone
def test_a_host_that_lends_and_is_stopped_holds_no_call_for_long(pool, tier, clock):
    os.kill(pool.pool.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert holds(tier, KEYS[0]) is None
    assert time.monotonic() - begun < AT_MOST_S
    assert tier.counts["failed_reads"] == 1
    os.kill(pool.pool.pid, signal.SIGCONT)
    wait_for(lambda: bool(holds(tier, KEYS[0])), "it is read again")
