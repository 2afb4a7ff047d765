"""The admin interface of real servers and those who should not get anything from it: crowds,
guessers, impostors."""

import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import sha256

import pytest

from kvtier.core.lookup import Progress
from kvtier.protocol import admin_proof
from tests.admin_server import TOKEN, administered, clearing
from tests.child_process import DEADLINE_S, most_lines, wait_for
from tests.http_server import answered_by
from tests.server_process import attached, run, save

SECRET = TOKEN.encode()
LIVE = "/healthz/live"


@pytest.fixture
def server():
    with administered() as server:
        yield server


@contextmanager
def crowd(server, members, says=b""):
    with ExitStack() as stack:
        every = []
        for _ in range(members):
            one = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)
            )
            one.sendall(says)
            every.append(one)
        yield every


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: local", id="half a request"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", id="idle after one"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400, id="never reads"),
    ],
)
def test_a_crowd_keeps_no_liveness_probe_out(server, says):
    for _ in range(3):
        with crowd(server, 80, says):
            assert [server.ask("GET", LIVE, token=None).status for _ in range(10)] == [200] * 10


def test_who_asks_nothing_is_sent_away(server):
    asks = b"GET /healthz/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def sent_away_first():
        with (
            crowd(server, 1, asks) as (idle,),
            crowd(server, 1) as (silent,),
            crowd(server, 1, b"GET /heal") as (slow,),
        ):
            assert idle.recv(4096)
            for one in (silent, slow):
                with suppress(ConnectionResetError):
                    assert one.recv(1) == b""
            idle.setblocking(False)
            try:
                return idle.recv(1) != b""
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False

    wait_for(sent_away_first, "who asks nothing leaves first")


def test_who_is_being_served_keeps_its_place(server):
    with attached(server.access(namespace="acme")) as client, ExitStack() as crowds:
        with clearing(server, client) as done:
            crowds.enter_context(crowd(server, 80))
            assert server.ask("GET", LIVE, token=None).status == 200
        assert (done[0]["complete"], done[0]["chunks"]) == (True, 5)


def test_a_probe_finds_a_place_beside_more_work_than_is_done_at_once(server):
    with attached(server.access(namespace="acme")) as client:
        save(client, run(1, 2))
        told: list[int] = []
        with client.save(run(2, 3)) as lease:
            clears = [
                threading.Thread(
                    target=lambda: told.append(
                        server.ask("POST", "/v1/clear", {"namespace": "acme"}).status
                    )
                )
                for _ in range(60)
            ]
            for one in clears:
                one.start()
            wait_for(lambda: 503 in told, "too much is asked")
            assert server.ask("GET", LIVE, token=None).status == 200
            assert server.ask("GET", "/healthz", token=None).status == 200
            lease.commit()
        for one in clears:
            one.join(DEADLINE_S)
    assert set(told) == {200, 503}
    assert told.count(200) >= 30


def test_what_is_no_http_costs_the_log_a_few_lines(server):
    begun = time.monotonic()
    for number in range(200):
        with crowd(
            server,
            1,
            b"GET / HTTP/1.1\r\nbad header \xff line\r\n\r\n"
            if number % 2
            else b"\x00\n\x16\x03\r\n\r\n",
        ):
            pass
    assert server.ask("GET", LIVE, token=None).status == 200
    said = server.said()
    assert "Traceback" not in said
    assert 1 <= said.count("kvtier.admin.http") <= most_lines(10, 10.0, begun)


_WRONG = (
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer   ",
    "bearer",
    TOKEN,
    f"Basic {TOKEN}",
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"Bearer {TOKEN} {TOKEN}",
    f"Bearer,{TOKEN}",
    f"Bearer {TOKEN.upper()}",
    "Bearer \xe9\xff",
    "Bearer null",
    "Bearer 0",
    admin_proof.SCHEME,
    f"{admin_proof.SCHEME} {TOKEN}",
    f"{admin_proof.SCHEME} 0 0 0 0",
    f"{admin_proof.SCHEME} 1 {'0' * 32} {'0' * 64} {'0' * 64}",
)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/lookup", {"keys": []}),
        ("POST", "/v1/clear", {"everything": True}),
        ("GET", "/v1/configuration", None),
        ("GET", "/v1/namespaces", None),
    ],
)
def test_no_token_and_no_malformed_one_is_taken(server, method, path, body):
    with attached(server.access()) as client:
        save(client, run(1, 2))
        for wrong in _WRONG:
            given = {} if wrong is None else {"Authorization": wrong}
            answer = server.ask(method, path, body, token=None, **given)
            assert (answer.status, answer.headers.get("www-authenticate")) == (401, "Bearer"), wrong
            assert admin_proof.ANSWER_HEADER.lower() not in answer.headers
        assert client.lookup(run(1, 2)).progress == Progress(2, 0), "nothing was cleared"
        assert (
            server.ask(method, path, body, token=None, Authorization=f"BEARER {TOKEN}").status
            == 200
        )


def _sent(server, credentials, body, path="/v1/clear", method="POST"):
    return server.ask(method, path, body or None, token=None, Authorization=credentials)


def start_of(server):
    return server.ask("GET", "/healthz", token=None).headers[admin_proof.START_HEADER.lower()]


def test_a_signed_request_holds_for_one_start_of_one_server(server):
    body = b'{"everything": true}'
    signed = [
        admin_proof.signed(SECRET, "POST", "/v1/clear", body, time.time(), start_of(server))
        for _ in range(3)
    ]
    with administered() as other:
        assert _sent(other, signed[0], body).status == 401
        assert _sent(server, signed[1], body).status == 200
    server.stop()
    server.start()
    assert [_sent(server, one, body).status for one in signed[1:]] == [401, 401]
    told = server.cli("clear", "--everything", "--token-file", server.token)
    assert (told.returncode, told.stdout) == (0, "0 chunks dropped\n")


def test_a_signed_request_holds_for_itself_alone(server):
    everything, other = b'{"everything": true}', b'{"namespace": "acme"}'
    now, start = time.time(), start_of(server)

    def sign(body=everything, token=SECRET, at=now, path="/v1/clear"):
        return admin_proof.signed(token, "POST", path, body, at, start)

    right = sign()
    answer = _sent(server, right, everything)
    assert answer.status == 200
    proof = answer.headers[admin_proof.ANSWER_HEADER.lower()]
    assert admin_proof.is_answer(SECRET, right, 200, answer.text.encode(), proof)
    assert _sent(server, right, everything).status == 401, "once"
    assert _sent(server, sign(other), everything).status == 401, "another body"
    assert _sent(server, sign(token=b"x" * 32), everything).status == 401, "another token"
    swapped = sign(other).replace(sha256(other).hexdigest(), sha256(everything).hexdigest())
    assert _sent(server, swapped, everything).status == 401, (
        "another body, and its digest in the header"
    )
    assert _sent(server, sign(at=now - 300), everything).status == 401, "an old one"
    assert _sent(server, sign(at=now + 300), everything).status == 401, "one for later"
    assert _sent(server, sign(path="/v1/lookup"), everything).status == 401, "another path"
    assert _sent(server, sign(), everything, "/v1/lookup").status == 401, "for another path"
    asked = admin_proof.signed(SECRET, "GET", "/v1/namespaces", b"", now, start)
    assert _sent(server, asked, b"", "/v1/namespaces", "GET").status == 200
    assert (
        _sent(server, sign(b"", path="/v1/namespaces"), b"", "/v1/namespaces", "GET").status == 401
    ), "another method"


class Impostor:
    """Has the port. Answers with ``answer``, or with what ``behind`` answers to the same request,
    changed or not."""

    def __init__(self, answer=b"", behind=None, swap=(b"", b"")):
        self.heard: list[tuple[str, dict[str, str], bytes]] = []
        self._said, self._behind, self._swap = answer, behind, swap
        self._server = answered_by(self._serve)

    def __enter__(self):
        self.url = self._server.__enter__()
        return self

    def __exit__(self, *raised):
        self._server.__exit__(*raised)

    def _serve(self, exchange):
        given = exchange.path, dict(exchange.headers), exchange.body
        self.heard.append(given)
        if self._behind is None:
            exchange.answer(self._said)
            return
        path, headers, body = given
        line = http.client.HTTPConnection("127.0.0.1", self._behind.port, timeout=DEADLINE_S)
        with closing(line):
            line.request(exchange.command, path, body, headers)
            real = line.getresponse()
            proofs = (admin_proof.ANSWER_HEADER, admin_proof.START_HEADER)
            kept = {name: real.getheader(name) or "" for name in proofs}
            exchange.answer(real.read().replace(*self._swap), real.status, **kept)

    def heard_the_token(self):
        return TOKEN in repr(self.heard)


FORGED = b'{"complete":true,"chunks":7,"left":0,"owed_deletes":0,"untouched":[]}'


def test_an_impostor_gets_no_token_and_is_not_believed(server):
    with Impostor(FORGED) as impostor:
        told = server.cli(
            "clear", "--everything", "--admin", impostor.url, "--token-file", server.token
        )
        assert (told.returncode, told.stdout) == (2, "")
        assert "does not prove that it knows the token" in told.stderr
        assert len(impostor.heard) == 1
        assert not impostor.heard_the_token()
        told = server.cli("stats", "--admin", impostor.url, "--token-file", server.token)
        assert (told.returncode, impostor.heard_the_token()) == (2, False)


def test_a_relay_can_neither_change_an_answer_nor_use_a_request_again(server):
    with attached(server.access()) as client, Impostor(behind=server) as relay:
        save(client, run(1, 2))
        words = ("clear", "--everything", "--token-file", server.token, "--admin")
        told = server.cli(*words, relay.url)
        assert (told.returncode, told.stdout) == (0, "2 chunks dropped\n")
        save(client, run(1, 2))
        path, headers, body = relay.heard[-1]
        again = server.ask("POST", path, body, token=None, Authorization=headers["Authorization"])
        assert again.status == 401
        assert client.lookup(run(1, 2)).progress == Progress(2, 0)
        assert not relay.heard_the_token()
        with Impostor(behind=server, swap=(b'"chunks":2', b'"chunks":0')) as liar:
            assert server.cli(*words, liar.url).returncode == 2


def test_the_right_server_is_believed_and_a_tokenless_one_only_without_a_token(server):
    assert server.cli("stats", "--admin", server.url, "--token-file", server.token).returncode == 0
    with administered(admin_token_file=None) as tokenless:
        assert tokenless.cli("stats", "--admin", tokenless.url).returncode == 0
        refused = tokenless.cli("stats", "--admin", tokenless.url, "--token-file", server.token)
        assert "another admin_token_file" in refused.stderr


def test_a_misspelt_namespace_is_told_which_there_are(server):
    with (
        attached(server.access(namespace="acme")) as client,
        attached(server.access(namespace="else")),
    ):
        save(client, run(1, 2))
        told = server.cli("clear", "--namespace", "acne", "--token-file", server.token)
        assert (told.returncode, told.stdout) == (2, "")
        assert (
            "'acne'" in told.stderr
            and "'acme', 'else'" in told.stderr
            and "did you mean 'acme'?" in told.stderr
        )
        answer = server.ask("POST", "/v1/clear", {"namespace": "nosuch"})
        assert answer.status == 404
        assert "'acme', 'else'" in json.loads(answer.text)["expected"]
        assert client.lookup(run(1, 2)).progress == Progress(2, 0)
        done = server.cli("clear", "--namespace", "else", "--token-file", server.token)
        assert (done.returncode, done.stdout) == (0, "0 chunks dropped\n"), (
            "it is known, and has nothing"
        )
