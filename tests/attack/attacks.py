"""The attacks of the suite, as its table has them: who, what he does, and what it may cost."""

from __future__ import annotations

import importlib.util
import resource
import shutil
import time
from contextlib import suppress
from functools import partial

from kvtier.admin.forms import MAX_TOKENS
from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, client_tls, enter, hello
from kvtier.core.errors import KVTierError
from kvtier.tiers.away.object_layout import room
from kvtier.tiers.redis.layout import Form
from tests.admin_server import TOKEN, AdminServer
from tests.attack import admin_bodies, bucket, clients, event_streams, hint_bodies
from tests.attack.front_end import FrontEnd
from tests.attack.honest import CHUNKS, PROMPT, Honest
from tests.attack.record_folder import odd_names
from tests.attack.redis_cluster import slow_cluster
from tests.attack.sizes import greetings
from tests.attack.stage import MIB, RAM_BYTES, Attack, Bound, Stage
from tests.attack.streams import ends_of_others, half_sent, handshakes, workers_of_one
from tests.attack.working_folder import planted_code
from tests.certificates import make_certificates
from tests.child_process import wait_for
from tests.redis_server import RedisServer
from tests.s3_server import URL, operated
from tests.server_process import LAYOUT, OTHER, SLOT, attached, load, run, save

_START_S = 60.0
"""For the tiers of a server that are slow to start, and for a hostile one to be left alone."""
INSECURE = ("--insecure",)
NO_NVME = {"nvme_path": None, "nvme_bytes": None}


def far(port: int) -> ServerAccess:
    """A client on another host, as it were."""
    own = hello(LAYOUT.fingerprint, SLOT, stream=True)
    return ServerAccess(Address("", "127.0.0.1", port), own)


# ---- local users beside an open port -------------------------------------------------------------


def packed_bodies(stage: Stage) -> None:
    server, body = stage.serve(), admin_bodies.bomb()
    with stage.attack(server):
        admin_bodies.gzip_bombs(server.url, body, count=12)


def endless_bodies(stage: Stage) -> None:
    server = stage.serve()
    with stage.attack(server):
        admin_bodies.endless_bodies(server.url, count=8, seconds=3.0)


def token_in_a_malformed_header(stage: Stage) -> None:
    server = stage.serve()
    with stage.attack(server):
        for _ in range(5):
            admin_bodies.malformed_headers(server.url, TOKEN)
    stage.must(TOKEN[:16] not in server.said(), "the admin token is in the log")


def messages_without_end(stage: Stage) -> None:
    events, replay = (f"ipc://{stage.folder}/run/{name}" for name in ("events", "replay"))
    server = stage.serve(server_events=f"{events}?replay={replay}")
    with stage.attack(server):
        for endpoint, kind in ((events, "SUB"), (replay, "DEALER")):
            event_streams.endless_message(endpoint, kind, most=100 * MIB)
            event_streams.endless_message(endpoint, kind, most=100 * MIB, length=1000)
            event_streams.giant_frame(endpoint, kind, most=100 * MIB)
            event_streams.pings_that_nobody_reads(endpoint, kind, most=100 * MIB, seconds=2.0)


def odd_names_in_a_recording(stage: Stage) -> None:
    folder = stage.folder / "record"
    folder.mkdir(0o700)
    odd = odd_names(folder)
    server = stage.serve(record=folder)
    with stage.attack(server):
        pass
    stage.must(server.ask("GET", "/healthz").status == 200, "the server is not healthy")
    stage.must(server.stop() == 0, "it does not stop cleanly")
    written = [each for each in folder.glob("requests-*.jsonl") if each not in odd]
    stage.must(any(each.stat().st_size for each in written), "nothing was recorded")


# ---- who has a token -----------------------------------------------------------------------------


def long_lookups(stage: Stage) -> None:
    server = stage.serve()
    tokens = [number % 1000 for number in range(MAX_TOKENS)]
    with stage.attack(server):
        for _ in range(3):
            told = server.lookup(fingerprint="ab" * 32, tokens=tokens, chunk_tokens=1)
            stage.must(told, "a lookup was not answered")


def questions_without_end(stage: Stage) -> None:
    server = stage.serve()
    with stage.attack(server):
        clients.questions(server.access(), run(1, 2000), sessions=4, seconds=3.0)


def streams_that_stop(stage: Stage) -> None:
    port = free_port()
    slots = 128
    server = stage.serve(
        f"tcp://127.0.0.1:{port}", flags=INSECURE, ram_bytes=slots * SLOT, **NO_NVME
    )
    with stage.attack(server), half_sent(far(port), run(3, 200)) as got:
        stage.must(len(got) > slots // 2, "one client may have most of what nobody needs")
        with attached(server.access(OTHER)) as newcomer:
            stage.must(save(newcomer, run(9, 5, OTHER)) == 5, "a newcomer gets no room")


def other_sizes(stage: Stage) -> None:
    port = free_port()
    server = stage.serve(f"tcp://127.0.0.1:{port}", flags=INSECURE)
    stage.visit(server)
    sizes = [SLOT + 4096 * number for number in range(1, 12)]
    greetings(far(port), sizes)
    greetings(server.access(), sizes)
    with stage.attack(server):
        greetings(far(port), sizes)


def crowd_that_never_greets(stage: Stage) -> None:
    port = free_port()
    server = stage.serve(f"tcp://127.0.0.1:{port}", flags=INSECURE)
    with stage.attack(server), event_streams.crowd(f"tcp://127.0.0.1:{port}", 300):
        with attached(server.access(OTHER)) as newcomer:
            stage.must(save(newcomer, run(9, 5, OTHER)) == 5, "an engine does not get in")
        stage.must(greetings(far(port), [SLOT]), "another host does not get in")


def workers_without_end(stage: Stage) -> None:
    """On a host where a server may have 256 descriptors."""
    port = free_port()
    server = stage.serve(f"tcp://127.0.0.1:{port}", flags=INSECURE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (256, 256))
    with stage.attack(server), workers_of_one(server.address, port, 300) as got:
        stage.must(got, "no worker gets in")
        with attached(server.access(OTHER)) as newcomer:
            stage.must(save(newcomer, run(9, 5, OTHER)) == 5, "a newcomer gets no descriptor")
        stage.must(server.ask("GET", "/healthz").status == 200, "the server is not healthy")


def handshakes_without_end(stage: Stage) -> None:
    port, token = free_port(), stage.folder / "server_token"
    folder = make_certificates(stage.folder)
    token.write_bytes(b"a secret of more than 16 bytes")
    token.chmod(0o600)
    keys = {"server_cert": folder / "ours-host.pem", "server_key": folder / "ours-host.key"}
    server = stage.serve(f"tcp://127.0.0.1:{port}", server_token_file=token, **keys)
    with stage.attack(server):
        begun = handshakes(port, every_s=0.002, seconds=4.0)
    stage.must(begun > 100, f"only {begun} handshakes were begun")
    own = hello(LAYOUT.fingerprint, SLOT, stream=True)
    tls = client_tls(str(folder / "ours.pem"))
    far_one = ServerAccess(Address("", "localhost", port), own, token.read_bytes(), tls)
    wait_for(lambda: entered_at(far_one), "another host gets in afterwards", _START_S)


# ---- tenants -------------------------------------------------------------------------------------


def clears_what_is_others(stage: Stage) -> None:
    stage.must(shutil.which("redis-server"), "there is no redis-server (make redis-server)")
    redis = stage.stack.enter_context(RedisServer())
    share = 64 * Form("kvtier", bytes(8)).room(SLOT)
    server = stage.serve(redis_url=redis.url, redis_bytes=share, **NO_NVME)
    stage.visit(server, "acme")
    spilled(server, "redis", CHUNKS)
    server.stop()
    server.start()
    clients.clears(server.access(OTHER, "evil"), run(PROMPT, CHUNKS))
    with stage.attack(server, "acme"):
        clients.clears(server.access(OTHER, "evil"), run(PROMPT, CHUNKS))


def fills_every_tier(stage: Stage) -> None:
    server = stage.serve(namespace_percent=50)
    stage.visit(server, "acme")
    taken = clients.fills(server.access(OTHER, "evil"), 2 * RAM_BYTES // SLOT)
    stage.must(taken, "another tenant could save nothing")
    with stage.attack(server, "acme"):
        clients.fills(server.access(OTHER, "evil"), 2 * RAM_BYTES // SLOT)


def guesses_salts(stage: Stage) -> None:
    server = stage.serve()
    salts = [f"salt {number}".encode() for number in range(500)]
    with stage.attack(server):
        found = clients.guesses(server.access(), [PROMPT, *range(CHUNKS - 1)], salts)
    stage.must(not found, f"{found} chunks of another tenant were found")


def reads_behind_its_chunks(stage: Stage) -> None:
    """It takes slots that others' chunks have filled."""
    port = free_port()
    server = stage.serve(f"tcp://127.0.0.1:{port}", flags=INSECURE, **NO_NVME)
    clients.fills(server.access(OTHER, "acme"), RAM_BYTES // SLOT)
    with stage.attack(server):
        read = ends_of_others(port, run(77, 64))
    stage.must(not read, f"{read} bytes of others' chunks were read")


def spilled(server: AdminServer, tier: str, chunks: int) -> None:
    wait_for(
        lambda: server.metric("kvtier_held_chunks", tier=tier) >= chunks, f"{chunks} in {tier}"
    )


# ---- hostile ends of our own calls ---------------------------------------------------------------


def engine_without_end(stage: Stage) -> None:
    """It is followed, and says one message that does not end, on both its endpoints."""
    at = [f"ipc://{stage.folder}/{name}" for name in ("engine", "replay")]
    act = event_streams.frames_without_end(100 * MIB)
    rogues = [
        stage.stack.enter_context(event_streams.RogueEngine(end, kind, act))
        for end, kind in zip(at, ("PUB", "ROUTER"), strict=True)
    ]
    server = stage.serve(admin_engines=f"rogue={at[0]}?replay={at[1]}")
    with stage.attack(server):
        wait_for(lambda: rogues[0].visits > 0, "it is followed")
        time.sleep(3.0)


def hostile_bucket(stage: Stage, lie: bucket.Answer, about: str = "GET") -> None:
    """It keeps chunks as it should. Then others are read, of which only it has any."""
    turncoat = bucket.Turncoat()
    url, seen = stage.stack.enter_context(bucket.hostile(turncoat))
    stage.stack.enter_context(operated(bucket.environment(url)))
    share, slots = 256 * room(SLOT), 64
    server = stage.serve(object_url=URL, object_bytes=share, ram_bytes=slots * SLOT, **NO_NVME)
    prompts = [run(1000 + number, CHUNKS) for number in range(30)]
    with attached(server.access()) as writer:
        for number, prompt in enumerate(prompts, 1):
            save(writer, prompt)
            spilled(server, "object", number * CHUNKS)  # RAM would drop what waits for long
    turncoat.lies[about] = lie
    asked = len(seen.requests)
    with stage.attack(server), attached(server.access()) as reader:
        for prompt in prompts[:3]:
            load(reader, prompt)
    stage.must(len(seen.requests) > asked, "the bucket was not asked")
    with attached(server.access()) as again:
        wait_for(
            lambda: load(again, run(PROMPT, CHUNKS)) == ["ram"] * CHUNKS,
            "honest ones are served again",
            _START_S,
        )


def endless_list(stage: Stage) -> None:
    """It is hostile when the server starts."""
    turncoat = bucket.Turncoat()
    turncoat.lies["LIST"] = bucket.endless_page(64 * MIB)
    url, _ = stage.stack.enter_context(bucket.hostile(turncoat))
    stage.stack.enter_context(operated(bucket.environment(url)))
    server = stage.serve(object_url=URL, object_bytes=256 * room(SLOT), **NO_NVME)
    with stage.attack(server):
        time.sleep(1.0)


def slow_nodes(stage: Stage) -> None:
    """The first engine waits for the start of the tier."""
    url, asked = stage.stack.enter_context(slow_cluster(100))
    server = stage.serve(redis_url=url, redis_bytes=1 << 20, **NO_NVME)
    until = time.monotonic() + _START_S
    while not entered(server):
        assert time.monotonic() < until, f"no engine got in within {_START_S:g} s"
    with stage.attack(server):
        time.sleep(1.0)
    stage.must(asked.info, "no node was asked")


def entered(server: AdminServer) -> bool:
    return entered_at(server.access())


def entered_at(access: ServerAccess) -> bool:
    with suppress(KVTierError, OSError):
        enter(access, _START_S).socket.close()
        return True
    return False


# ---- vLLM's port, with the middleware for hints --------------------------------------------------


def bodies_without_a_key(stage: Stage) -> None:
    body = hint_bodies.many_objects()
    head = f"POST {hint_bodies.PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    front_end = vllm_front_end(stage)
    with Honest("front-end", front_end.url) as honest, stage.beside(honest, front_end.pid):
        told = [admin_bodies.answered(front_end.url, head.encode() + body, 10.0) for _ in range(10)]
    stage.must(set(told) <= {401, None}, f"who has no key was answered {told}")


def bodies_held_open(stage: Stage) -> None:
    front_end = vllm_front_end(stage)
    with (
        Honest("front-end", front_end.url) as honest,
        stage.beside(honest, front_end.pid),
        hint_bodies.held_open(front_end.port),
    ):
        time.sleep(1.0)


def vllm_front_end(stage: Stage) -> FrontEnd:
    assert importlib.util.find_spec("vllm"), "vLLM is not installed"
    return stage.stack.enter_context(FrontEnd(stage.folder))


USER, TENANT, BUCKET = "another user of the host", "a tenant", "a hostile bucket"
CLIENT, VLLM = "a client with the token", "a client without an API key"
IN_ITS_PROCESS = Bound(p99_ms=200.0, grown_mib=256.0)
"""What is taken whole is taken by the process of the bucket's library, which has a limit."""
ATTACKS = (
    Attack("packed", USER, "12 bodies to the admin port that unpack to 200 MiB", packed_bodies),
    Attack(
        "endless",
        USER,
        "8 bodies without end to the admin port",
        endless_bodies,
        Bound(p99_ms=200.0),
    ),
    Attack(
        "header",
        "who reads logs",
        "the admin token in headers that are no HTTP",
        token_in_a_malformed_header,
    ),
    Attack("events", USER, "messages without end to server.events", messages_without_end),
    Attack("record", USER, "odd names in the recording's folder", odd_names_in_a_recording),
    Attack("folder", USER, "Python in the folder where commands are typed", planted_code),
    Attack("lookups", "a router", "3 lookups of 262,144 tokens", long_lookups, Bound(grown_mib=64)),
    Attack("questions", CLIENT, "questions about 2,000 chunks without end", questions_without_end),
    Attack("streams", CLIENT, "200 chunks of which one byte comes", streams_that_stop),
    Attack("sizes", CLIENT, "greetings with 11 other chunk sizes", other_sizes),
    Attack(
        "crowd", "whoever reaches the port", "300 sockets without a word", crowd_that_never_greets
    ),
    Attack("workers", CLIENT, "300 workers that join with one ticket", workers_without_end),
    Attack(
        "handshakes",
        "whoever reaches the port",
        "TLS handshakes without end, 500 a second",
        handshakes_without_end,
    ),
    Attack(
        "ends",
        f"{TENANT} by TCP",
        "reads 4,095 bytes behind 64 chunks of its own",
        reads_behind_its_chunks,
    ),
    Attack(
        "clear",
        f"{TENANT} by namespace",
        "clears a shared Redis after a restart",
        clears_what_is_others,
    ),
    Attack("fill", f"{TENANT} by namespace", "saves twice what RAM holds", fills_every_tier),
    Attack("salts", f"{TENANT} by salt", "asks for a prompt under 500 salts", guesses_salts),
    Attack(
        "engine",
        "an engine of the fleet",
        "a message without end to who follows it",
        engine_without_end,
    ),
    Attack(
        "object",
        BUCKET,
        "objects of 64 MiB for 8 KiB",
        partial(hostile_bucket, lie=bucket.endless_object(room(SLOT), 64 * MIB)),
    ),
    Attack(
        "refusal",
        BUCKET,
        "refusals of 64 MiB",
        partial(hostile_bucket, lie=bucket.endless_refusal(64 * MIB)),
        IN_ITS_PROCESS,
    ),
    Attack("page", BUCKET, "a list's page of 64 MiB", endless_list, IN_ITS_PROCESS),
    Attack("cluster", "a hostile Redis", "a map of 100 nodes, each slow", slow_nodes),
    Attack("body", VLLM, "10 bodies of 16 MiB", bodies_without_a_key, Bound(grown_mib=64.0)),
    Attack("held", VLLM, "60 bodies of 16 MiB held open", bodies_held_open, Bound(grown_mib=64.0)),
)
