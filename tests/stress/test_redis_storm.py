"""RedisTier under load while its server hangs, dies and comes back empty: it forgets, never lies,
and heals."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from tests.clock import Clock
from tests.redis_server import RedisServer, impatient
from tests.tier_chunks import KEYS, chunk, holds

pytestmark = pytest.mark.redis

LANES = 4
BLOWS = 30
SHORT_S = 0.05


def test_a_storm_of_stops_and_crashes_never_gives_wrong_bytes():
    """Every read is compared byte by byte (:func:`holds`). At the end the tier works and nothing is
    left behind."""
    clock = Clock()
    with RedisServer() as server:
        tier = server.tier(clock=clock)
        load = Load(tier)
        with impatient(tier._servers, SHORT_S), ThreadPoolExecutor(LANES) as lanes:
            work = [lanes.submit(load.lane, number) for number in range(LANES)]
            try:
                for dice in map(random.Random, range(BLOWS)):
                    load.await_service(clock)
                    strike(server, dice)
            finally:
                load.over.set()
            for done in work:
                done.result()
        clock.now += 100.0
        assert tier.write(KEYS[0], chunk(KEYS[0]))
        for key in KEYS:
            tier.delete(key)
        assert tier.counts["corrupt"] == 0
        with server.admin() as admin:
            assert all(name.endswith(b"{alive}") for name in admin.keys("*")), (
                "what broke off, and what could not be deleted, was cleaned up"
            )


class Load:
    """Lanes that write, read, find and delete. Each owns two keys and reads all."""

    def __init__(self, tier):
        self.tier = tier
        self.over = threading.Event()
        self.served = [0] * LANES

    def lane(self, number):
        for turn in count():
            if self.over.is_set():
                return
            key = KEYS[2 * number + turn % 2]
            self.tier.write(key, chunk(key))
            self.served[number] += sum(
                bool(holds(self.tier, each)) for each in (key, KEYS[turn % len(KEYS)])
            )
            self.tier.find(KEYS)
            if turn % 3 == 0:
                self.tier.delete(key)

    def await_service(self, clock):
        """Let time pass for the breakers until chunks are served again."""
        before = sum(self.served)
        while sum(self.served) < before + 20:
            clock.now += 1.0
            self.over.wait(0.001)


def strike(server, dice):
    blow = dice.choice(["hang", "crash", "evict"])
    if blow == "hang":
        server.pause()
        threading.Event().wait(2 * SHORT_S)
        server.resume()
    elif blow == "crash":
        server.kill()
        server.start()
    else:
        with server.admin() as admin:
            for name in admin.keys()[:: dice.randint(2, 5)]:
                admin.delete(name)
