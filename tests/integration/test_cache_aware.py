"""deploy/routing's cache-aware policy: HAProxy with the files that lie there, a real kvtier server,
vLLM's own publishers of events, and engines that are stubs."""

import shutil
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest

from kvtier.bench.multi_turn.arms import ARMS, CACHE_AWARE
from kvtier.bench.multi_turn.fleet import router
from tests.admin_server import AdminServer
from tests.child_process import wait_for
from tests.integration.test_engine_streams import BLOCK, TOKENS, Publisher, followed, stored, until
from tests.integration.test_routing import Asker, haproxy_command
from tests.stub_engine import StubEngine, stub_engines

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy")

TEXT = "".join(map(chr, range(100, 100 + 8 * BLOCK)))


class Fleet(NamedTuple):
    asker: Asker
    server: AdminServer
    publishers: list[Publisher]
    engines: list[StubEngine]

    def went_to(self, **asked):
        return Asker(self.asker.url).ask(**asked)


@contextmanager
def cache_aware(folder):
    with followed("engine-1", "engine-2") as (server, publishers), stub_engines(2) as engines:
        lookup = {"ROUTER_LOOKUP": server.url, "KVTIER_ADMIN_TOKEN_FILE": str(server.token)}
        arm = replace(ARMS[CACHE_AWARE], router=lookup)
        with router(haproxy_command(folder), arm, engines, folder / "router.log") as url:
            yield Fleet(Asker(url), server, publishers, engines)


@pytest.fixture
def fleet(tmp_path):
    with cache_aware(tmp_path) as one:
        yield one


def test_a_prompt_goes_where_its_longest_beginning_is(fleet):
    one, two = fleet.publishers
    one.say(stored(0, 5))
    two.say(stored(0, 6, "CPU"))
    until(fleet.server, 5)
    until(fleet.server, 6, "engine-2")
    assert {fleet.went_to(prompt=TOKENS) for _ in range(4)} == {"engine-2"}
    one.say(stored(5, 8))
    until(fleet.server, 8)
    assert {fleet.went_to(prompt=TOKENS) for _ in range(4)} == {"engine-1"}
    named = {"X-Session-Id": "c"}
    assert fleet.went_to(prompt=TOKENS, headers=named) == "engine-1"


def test_what_is_known_of_less_than_half_of_a_prompt_is_no_reason(fleet):
    fleet.publishers[0].say(stored(0, 3))
    until(fleet.server, 3)
    seen = {fleet.went_to(prompt=TOKENS) for _ in range(4)}
    assert seen == {"engine-1", "engine-2"}, "in turns"
    sticky = {fleet.went_to(prompt=TOKENS, headers={"X-Session-Id": "c"}) for _ in range(4)}
    assert len(sticky) == 1


def test_text_is_cut_into_tokens_by_an_engine_and_salts_are_kept_apart(fleet):
    mine = list(map(ord, TEXT))
    event = stored(0, 8, token_ids=mine, extra_keys=[["tenant"], *[None] * 7])
    fleet.publishers[1].say(event)
    until(fleet.server, 8, "engine-2", tokens=mine, salt="tenant")
    salted = {fleet.went_to(prompt=TEXT, cache_salt="tenant") for _ in range(4)}
    assert salted == {"engine-2"}
    plain = {fleet.went_to(prompt=TEXT) for _ in range(4)}
    assert plain == {"engine-1", "engine-2"}
    assert all("tokens" not in body for engine in fleet.engines for body, _ in engine.asked)


def test_an_engine_that_died_is_asked_no_more_and_neither_is_a_server_that_died(fleet):
    one, two = fleet.publishers
    one.say(stored(0, 8))
    until(fleet.server, 8)
    assert fleet.went_to(prompt=TOKENS) == "engine-1"
    fleet.engines[0].stop()
    assert {fleet.went_to(prompt=TOKENS) for _ in range(4)} == {"engine-2"}
    one.stop()
    two.say(stored(0, 7))
    until(fleet.server, 7, "engine-2")
    until(fleet.server, 0)
    fleet.server.kill()
    assert {fleet.went_to(prompt=TOKENS) for _ in range(4)} == {"engine-2"}
    fleet.engines[0].start()
    wait_for(
        lambda: {fleet.went_to(prompt=TOKENS) for _ in range(2)} == {"engine-1", "engine-2"},
        "in turns again, without the server",
    )
