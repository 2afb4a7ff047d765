"""deploy/routing: the routers with the files that lie there, real processes in front of two engines
that are stubs."""

import json
import shutil
import urllib.request
from contextlib import contextmanager
from http.cookiejar import CookieJar

import pytest

from kvtier.bench.multi_turn.arms import ARMS
from kvtier.bench.multi_turn.fleet import router
from tests.child_process import DEADLINE_S, wait_for
from tests.conftest import ROOT
from tests.stub_engine import stub_engines

ROUTING = ROOT / "deploy/routing"
VLLM_ROUTER = ["sh", str(ROUTING / "vllm-router.sh")]
CONVERSATIONS = 8
TURNS = 3


class Asker:
    def __init__(self, url):
        self.url = url
        self._url = f"{url}/v1/completions"
        jar = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), jar)

    def ask(self, prompt="ba", headers=None, **body):
        data = json.dumps(body | {"model": "stub", "prompt": prompt, "max_tokens": 1}).encode()
        request = urllib.request.Request(  # noqa: S310
            self._url, data, {"Content-Type": "application/json"} | (headers or {})
        )
        with self._opener.open(request, timeout=DEADLINE_S) as reply:
            reply.read()
            return str(reply.headers.get("X-Engine", ""))


def haproxy_command(folder):
    """HAProxy with the files of deploy/routing, which waits longer on a busy host: for a lookup,
    and before an engine that does not answer its checks is no more asked."""
    for name, given, more in (
        ("haproxy.cfg", "fall 2 ", "fall 4 "),
        ("cache-aware.lua", "timeout = 300}", f"timeout = {1000 * DEADLINE_S:.0f}}}"),
    ):
        text = (ROUTING / name).read_text()
        assert text.count(given) == 1
        (folder / name).write_text(text.replace(given, more))
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


@contextmanager
def routed(command, folder, arm="sticky"):
    with (
        stub_engines(2) as engines,
        router(command, ARMS[arm], engines, folder / "router.log") as url,
    ):
        yield url, engines


@pytest.fixture(name="haproxy")
def haproxy_(tmp_path):
    if shutil.which("haproxy") is None:
        pytest.skip("there is no haproxy")
    with routed(haproxy_command(tmp_path), tmp_path) as both:
        yield both


def with_vllm_router(monkeypatch):
    places = sorted(ROOT.glob(".venv-peers/vllm-router-*/bin"))
    if not places:
        pytest.skip("vllm-router is not installed (make peers)")
    monkeypatch.setenv("PATH", str(places[0]), prepend=":")


def answered_by(engines, ask):
    before = [len(engine.asked) for engine in engines]
    ask()
    (found,) = (place for place, engine in enumerate(engines) if len(engine.asked) > before[place])
    return found


@pytest.mark.parametrize("by", ["header", "user", "cookie"])
def test_a_conversation_keeps_its_engine_and_new_ones_are_spread(haproxy, by):
    url, engines = haproxy
    askers = [Asker(url) for _ in range(CONVERSATIONS)]
    seen: dict[int, set[str]] = {}
    for _ in range(TURNS):
        for number, asker in enumerate(askers):
            headers = {"X-Session-Id": f"c{number}"} if by == "header" else {}
            body = {"user": f"c{number}"} if by == "user" else {}
            one = asker if by == "cookie" else Asker(url)
            seen.setdefault(number, set()).add(one.ask("ba" * 1000, headers, **body))
    assert all(len(names) == 1 for names in seen.values()), seen
    assert {name for names in seen.values() for name in names} == {"engine-1", "engine-2"}
    assert [len(engine.asked) for engine in engines] == [CONVERSATIONS * TURNS // 2] * 2


def test_one_clients_cookie_does_not_tie_its_conversations_together(haproxy):
    url, _ = haproxy
    gateway = Asker(url)
    gateway.ask()
    names = [gateway.ask(headers={"X-Session-Id": f"c{number}"}) for number in range(4)]
    assert set(names) == {"engine-1", "engine-2"}
    assert names == [gateway.ask(headers={"X-Session-Id": f"c{number}"}) for number in range(4)]


@pytest.mark.parametrize("by", ["header", "cookie"])
def test_a_dead_engines_conversations_go_to_another_one_and_stay(haproxy, by):
    url, engines = haproxy
    asker = Asker(url)
    headers = {"X-Session-Id": "c"} if by == "header" else {}
    asker.ask(headers=headers)
    name = asker.ask(headers=headers)
    dead = int(name.removeprefix("engine-")) - 1
    engines[dead].stop()
    names = {asker.ask(headers=headers) for _ in range(5)}
    assert names == {f"engine-{2 - dead}"}


def test_a_request_whose_engine_dies_before_it_answers_is_asked_of_another(haproxy):
    url, engines = haproxy
    asker = Asker(url)
    name = asker.ask(headers={"X-Session-Id": "c"})
    mine = int(name.removeprefix("engine-")) - 1
    engines[mine].dies = True
    long = "ba" * 50_000  # more than HAProxy keeps of a request by default
    asker.ask(long, headers={"X-Session-Id": "c"})
    assert sum(body["prompt"] == long for engine in engines for body, _ in engine.asked) == 1


def test_vllm_router_keeps_a_conversation_and_moves_it_when_its_engine_dies(tmp_path, monkeypatch):
    with_vllm_router(monkeypatch)
    with routed(VLLM_ROUTER, tmp_path) as (url, engines):
        homes = {}
        for number in range(CONVERSATIONS):
            headers = {"X-Session-Id": f"c{number}"}
            asked = [
                answered_by(engines, lambda h=headers: Asker(url).ask(headers=h))
                for _ in range(TURNS)
            ]
            assert len(set(asked)) == 1, (number, asked)
            homes[number] = asked[0]
        assert set(homes.values()) == {0, 1}
        engines[0].stop()
        moved = next(number for number, home in homes.items() if home == 0)
        headers = {"X-Session-Id": f"c{moved}"}

        def answered():
            try:
                return answered_by(engines, lambda: Asker(url).ask(headers=headers)) == 1
            except (OSError, ValueError):
                return False

        wait_for(answered, "another engine answers")
