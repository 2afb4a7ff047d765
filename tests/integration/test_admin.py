"""The admin interface of real servers: what it tells, what it forgets, whom it lets in, and its
OpenAPI document."""

import http.client
import json
import re
import socket
import ssl
from contextlib import ExitStack

import pytest
from jsonschema import Draft202012Validator

from kvtier.bench.processes.servers import free_port
from kvtier.core.lookup import Asker, Progress
from kvtier.eviction.hints import session_name
from tests.admin_server import (
    TOKEN,
    AdminServer,
    Body,
    administered,
    clearing,
    spilled,
)
from tests.child_process import DEADLINE_S, wait_for
from tests.command import kvtier
from tests.redis_server import make_certificate
from tests.server_process import LAYOUT, SLOT, at_rest, attached, run, save, short_folder


@pytest.fixture
def server():
    with administered() as server:
        yield server


def test_every_answer_is_what_the_document_says(server):
    with attached(server.access(namespace="tenant")) as client:
        save(client, run(1, 3))
    document = server.ask("GET", "/openapi.json").body
    assert document["openapi"] == "3.1.0"
    key = run(1, 1)[0].hex()
    evil = {"Host": "evil.example"}
    tokens = {"fingerprint": LAYOUT.fingerprint.hex(), "tokens": [1, 0, 1], "chunk_tokens": 1}
    asked: list[tuple[str, str, Body | bytes | None, str | None, dict[str, str], int]] = [
        *[
            ("GET", path, None, None, {}, 200)
            for path in document["paths"]
            if path.startswith("/healthz")
        ],
        *[
            ("GET", path, None, None, {}, 200)
            for path in ("/", "/metrics", "/v1/stats", "/v1/history", "/openapi.json")
        ],
        *[
            (m.upper(), path, None, None, evil, 421)
            for path, ms in document["paths"].items()
            for m in ms
        ],
        *[
            ("GET", path, None, token, {}, status)
            for path in ("/v1/configuration", "/v1/namespaces")
            for token, status in ((TOKEN, 200), (None, 401), ("guess", 401))
        ],
        ("POST", "/v1/lookup", {"keys": [key]}, TOKEN, {}, 200),
        ("POST", "/v1/lookup", tokens, TOKEN, {}, 200),
        ("POST", "/v1/lookup", tokens | {"salt": "user-7"}, TOKEN, {}, 200),
        ("POST", "/v1/lookup", {"keys": [key]}, None, {}, 401),
        ("POST", "/v1/lookup", tokens | {"keys": [key]}, TOKEN, {}, 400),
        ("POST", "/v1/lookup", {"keys": [key[:-1]]}, TOKEN, {}, 400),
        ("POST", "/v1/lookup", {"keys": [key] * 8193}, TOKEN, {}, 400),
        ("POST", "/v1/lookup", tokens | {"tokens": [-1]}, TOKEN, {}, 400),
        ("POST", "/v1/lookup", tokens | {"salt": "a", "extra": "00"}, TOKEN, {}, 400),
        ("POST", "/v1/lookup", b"{" + b" " * (5 << 20) + b"}", TOKEN, {}, 413),
        ("POST", "/v1/lookup", b"[]", TOKEN, {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/hint", {"session": "one", "over": True}, TOKEN, {}, 200),
        ("POST", "/v1/hint", {"session": "one", "keep_s": -1}, TOKEN, {}, 400),
        ("POST", "/v1/hint", {"session": "one"}, None, {}, 401),
        ("POST", "/v1/hint", b"x" * (5 << 20), TOKEN, {}, 413),
        ("POST", "/v1/hint", b"{}", TOKEN, {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/clear", {}, TOKEN, {}, 400),
        ("POST", "/v1/clear", {"namspace": "tenant"}, TOKEN, {}, 400),
        ("POST", "/v1/clear", {"namespace": "tenant", "everything": True}, TOKEN, {}, 400),
        ("POST", "/v1/clear", b"not JSON", TOKEN, {}, 400),
        ("POST", "/v1/clear", {"namespace": "tennant"}, TOKEN, {}, 404),
        ("POST", "/v1/clear", {"everything": True}, "guess", {}, 401),
        ("POST", "/v1/clear", b"x" * (5 << 20), TOKEN, {}, 413),
        ("POST", "/v1/clear", b"{}", TOKEN, {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/clear", {"everything": True}, TOKEN, {}, 200),
    ]
    seen = set()
    for method, path, body, token, headers, status in asked:
        answer = server.ask(method, path, body, token=token, **headers)
        assert answer.status == status, (method, path, answer)
        operation = document["paths"][path][method.lower()]
        (kind, form), *rest = operation["responses"][str(status)]["content"].items()
        assert not rest
        assert answer.headers["content-type"].startswith(kind)
        shown = answer.body if kind == "application/json" else answer.text
        Draft202012Validator(form["schema"] | {"components": document["components"]}).validate(
            shown
        )
        seen.add((method, path, status))
    promised = {
        (method.upper(), path, int(status))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for status in operation["responses"]
    }
    unseen = {
        what
        for what in promised - seen
        if what[2] not in {403, 500, 503} and what[1:] != ("/v1/stats", 401)
    }
    assert {(path, status) for _, path, status in unseen} == {
        ("/metrics", 401),
        ("/v1/history", 401),
        ("/openapi.json", 401),
    }, "beyond loopback"
    assert seen <= promised


def test_lookup_says_how_far_each_place_reaches(server):
    with attached(server.access(namespace="tenant")) as client:
        save(client, run(1, 6))
        spilled(server, 6)
        client.invalidate(run(1, 6)[4:])
        assert client.lookup(run(1, 6)).progress == Progress(4, 0), "the server has read it"
        keys = [key.hex() for key in run(1, 8)]
        (size_class,) = server.lookup(keys=keys)["size_classes"]
        assert (size_class["ready"], size_class["coming"]) == (4, 0)
        assert size_class["tiers"] == [{"tier": "ram", "chunks": 4}, {"tier": "nvme", "chunks": 4}]
        for prompt in (2, 3, 4):  # no engine gets all slots at once
            save(client, run(prompt, 12))
        assert client.lookup(run(1, 8)).progress == Progress(0, 4)
        (size_class,) = server.lookup(keys=keys)["size_classes"]
        assert (size_class["ready"], size_class["coming"]) == (0, 4)
        assert size_class["tiers"] == [{"tier": "ram", "chunks": 0}, {"tier": "nvme", "chunks": 4}]
        (here,) = server.ask("GET", "/v1/namespaces").body["namespaces"]
        assert here == {
            "slot_bytes": SLOT,
            "fingerprint": LAYOUT.fingerprint.hex(),
            "namespace": "tenant",
            "engine": "test",
        }
        told = server.lookup(fingerprint=here["fingerprint"], tokens=[1, *range(7)], chunk_tokens=1)
        assert (told["chunks"], told["size_classes"][0]["coming"]) == (8, 4)
        salted = server.lookup(
            fingerprint=here["fingerprint"], tokens=[1, *range(7)], chunk_tokens=1, salt="x"
        )
        assert salted["size_classes"][0]["coming"] == 0


def test_a_save_in_progress_is_waited_for(server):
    with attached(server.access(namespace="acme")) as client:
        with clearing(server, client) as done:
            assert not done
        assert (done[0]["complete"], done[0]["chunks"]) == (True, 5)
        assert client.lookup(run(2, 3)).progress == Progress(0, 0)


def test_a_server_without_a_token_clears_nothing_for_anybody():
    with administered(admin_token_file=None) as server, attached(server.access()) as client:
        save(client, run(1, 2))
        for path, body in (("/v1/clear", {"everything": True}), ("/v1/lookup", {"keys": []})):
            refused = server.ask("POST", path, body)
            assert refused.status == 403
            assert "admin_token_file" in refused.body["expected"]
        assert client.lookup(run(1, 2)).progress == Progress(2, 0)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "127.evil.example", "[", ""]
)
def test_a_page_whose_name_was_rebound_gets_nothing(server, host):
    refused = server.ask("GET", "/v1/stats", Host=host, Origin="http://evil.example")
    assert refused.status in {400, 421}
    assert "size_classes" not in refused.text
    assert not any(name.startswith("access-control") for name in refused.headers)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "127.8.8.8:80", "[::1]:9"])
def test_loopback_by_any_name_is_served(server, host):
    answer = server.ask("GET", "/v1/stats", Host=host, token=None)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"


def test_unknown_paths_and_methods_are_answered_in_words(server):
    lost, wrong = server.ask("GET", "/v2/nothing"), server.ask("DELETE", "/v1/stats")
    assert (lost.status, wrong.status, wrong.headers["allow"]) == (404, 405, "GET")
    assert all({"what", "expected", "do"} == answer.body.keys() for answer in (lost, wrong))


def test_many_connections_are_bounded_and_engines_go_on():
    with ExitStack() as stack:
        server = stack.enter_context(administered(patient=True))
        place = ("127.0.0.1", server.port)
        crowd = [stack.enter_context(socket.create_connection(place)) for _ in range(80)]

        def ended():
            return sum(_ended(one) for one in crowd)

        wait_for(lambda: ended() == 16, "all but 64 are closed")
        with attached(server.access()) as client:
            assert save(client, run(1, 2)) == 2
        assert ended() == 16, "and no more"


def _ended(one):
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_beyond_loopback_there_is_a_token_and_tls():
    with short_folder() as folder:
        certificate, key = make_certificate(folder, "server")
        port = free_port()
        secure = {"admin": f"https://0.0.0.0:{port}", "server_cert": certificate, "server_key": key}
        assert (
            "set admin_token_file" in AdminServer(folder, admin_token_file=None, **secure).refusal()
        )
        assert "needs a certificate" in AdminServer(folder, admin=secure["admin"]).refusal()
        trusting = ssl.create_default_context(cafile=str(certificate))
        with AdminServer(folder, server_ca=None, **secure) as server:
            line = http.client.HTTPSConnection(
                "127.0.0.1", port, context=trusting, timeout=DEADLINE_S
            )
            told = []
            for path, headers in (
                ("/healthz", {}),
                ("/metrics", {}),
                ("/nothing", {}),
                ("/metrics", {"Authorization": f"Bearer {TOKEN}", "Host": "kvtier.cluster.local"}),
            ):
                line.request("GET", path, headers=headers)
                answer = line.getresponse()
                answer.read()
                told.append(answer.status)
            line.close()
            assert told == [200, 401, 404, 200]
            config = folder / "client.yaml"
            config.write_text(
                f"server_ca: {certificate}\nadmin: https://127.0.0.1:{port}\nadmin_token_file: "
                f"{server.token}\n"
            )
            shown = kvtier("stats", "--config", config)
            assert shown.returncode == 0, shown
            assert "no engine has come yet" in shown.stdout


def test_stats_and_clear_from_a_terminal(server):
    with attached(server.access(namespace="acme")) as client:
        save(client, run(1, 4))
        spilled(server, 4)
        shown = server.cli("stats", "--admin", server.url)
        assert shown.returncode == 0, shown
        assert re.search(r"^nvme +4 ", shown.stdout, re.MULTILINE)
        assert json.loads(server.cli("stats", "--json").stdout)["size_classes"][0]["slots"] == 32
        assert server.cli("clear").returncode == 2, "it has to be told what"
        done = server.cli(
            "clear", "--namespace", "acme", "--admin", server.url, "--token-file", server.token
        )
        assert (done.returncode, done.stdout) == (0, "4 chunks dropped\n")
        assert client.lookup(run(1, 4)).progress == Progress(0, 0)
        guess = server.token.with_name("guess")
        guess.write_text("x" * 32)
        guess.chmod(0o600)
        refused = server.cli("clear", "--everything", "--token-file", guess)
        assert (refused.returncode, "wrong" in refused.stderr) == (2, True)
    server.stop()
    gone = server.cli("stats")
    assert gone.returncode == 2
    assert f"no kvtier server answers at {server.url}" in gone.stderr


def test_a_session_is_closed_over_http_for_its_tenant_and_salt_alone():
    with administered() as server, attached(server.access(namespace="tenant")) as client:
        ended, other = run(1, 10), run(2, 10)
        for keys, name in (
            (other, session_name(None, "mine")),
            (ended, session_name("salt", "mine")),
        ):
            client.load(keys, asker=Asker(name)).close()
            save(client, keys)
        wait_for(lambda: client.stats().get("followed_prompts", 0) == 2, "followed")
        asked = {"session": "mine", "salt": "salt", "over": True}
        assert server.ask("POST", "/v1/hint", asked | {"namespace": "nobody"}).body == {"told": 0}
        assert server.ask("POST", "/v1/hint", asked | {"namespace": "tenant"}).body == {"told": 1}
        wait_for(lambda: client.stats().get("hints_followed", 0) == 1, "followed")
        at_rest(client)  # a chunk that is being written keeps its slot
        assert save(client, run(3, 16)) == 16
        assert client.lookup(other).ready == 10, "it is the older one, and stays"
        assert client.lookup(ended).ready < 10
