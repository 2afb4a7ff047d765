"""The attacks of the suite, as its table has them: who, what he does, and what it may cost."""

import gzip
import resource
import shutil
import time
from contextlib import closing, suppress
from functools import partial

from kvtier.admin.forms import MAX_TOKENS
from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, client_tls, enter, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.errors import KVTierError
from kvtier.tiers.away.whole_objects import room
from kvtier.tiers.redis.layout import Form
from tests.admin_server import TOKEN
from tests.attack import admin_bodies, bucket, clients, event_streams
from tests.attack.honest import CHUNKS, PROMPT
from tests.attack.redis_cluster import slow_cluster
from tests.attack.stage import MIB, RAM_BYTES, Attack, Bound, cpu_s
from tests.certificates import make_certificates
from tests.child_process import most_lines, wait_for
from tests.redis_server import RedisServer
from tests.s3_server import URL, operated
from tests.server_process import LAYOUT, OTHER, SLOT, attached, load, run, save

_START_S = 60.0
"""For the tiers of a server that are slow to start, and for a hostile one to be left alone."""
NO_NVME = {"nvme_path": None, "nvme_bytes": None}


def open_port(stage, **settings):
    port = free_port()
    return stage.serve(f"tcp://127.0.0.1:{port}", flags=("--insecure",), **settings), port


# ---- local users beside an open port -------------------------------------------------------------


def packed_bodies(stage):
    server, body = stage.serve(), admin_bodies.bomb()
    begun = time.process_time()
    gzip.decompress(body)
    once, used = time.process_time() - begun, cpu_s(server.pid)
    with stage.attack(server):
        for method, path, status in (
            ("GET", "/healthz", 200),
            ("POST", "/v1/lookup", 401),
            ("POST", "/nosuch", 404),
        ):
            told = admin_bodies.gzip_bombs(server.url, body, count=4, path=path, method=method)
            stage.must(told == [status] * 4, f"{method} {path} was answered {told}")
    stage.must(cpu_s(server.pid) - used < 6 * once, "bodies were unpacked")


def endless_bodies(stage):
    server = stage.serve()
    with stage.attack(server):
        admin_bodies.endless_bodies(server.url, count=8, seconds=3.0)


def token_in_headers(stage):
    server = stage.serve()
    with stage.attack(server):
        for _ in range(5):
            admin_bodies.malformed_headers(server.url, TOKEN)
    stage.must(TOKEN[:16] not in server.said(), "the admin token is in the log")
    stage.must("kvtier.admin.http" in server.said(), "that there was something is not told")


def messages_without_end(stage):
    begun, most = time.monotonic(), 100 * MIB
    events, replay = (f"ipc://{stage.folder}/run/{name}" for name in ("events", "replay"))
    server = stage.serve(server_events=f"{events}?replay={replay}")
    with stage.attack(server):
        for endpoint, kind in ((events, "SUB"), (replay, "DEALER")):
            for taken in (
                event_streams.endless_message(endpoint, kind, most=most),
                event_streams.endless_message(endpoint, kind, most=most, length=1000),
                event_streams.giant_frame(endpoint, kind, most=most),
            ):
                stage.must(taken is not None and taken < 20 * MIB, "it was not hung up on")
            event_streams.pings_that_nobody_reads(endpoint, kind, most=most, seconds=2.0)
        for says in (b"", event_streams.GREETING, b"GET / HTTP/1.1\r\n\r\n" * 100):
            with event_streams.crowd(replay, 70, says):
                stage.must(event_streams.end_of_replay(replay), "a crowd keeps a subscriber out")
    told = server.said().count("more was refused")
    stage.must(told <= most_lines(10, 10.0, begun), "strangers fill the log")


# ---- who has a token -----------------------------------------------------------------------------


def long_lookups(stage):
    server = stage.serve()
    tokens = [number % 1000 for number in range(MAX_TOKENS)]
    with stage.attack(server):
        for _ in range(3):
            told = server.lookup(fingerprint="ab" * 32, tokens=tokens, chunk_tokens=1)
            stage.must(told, "a lookup was not answered")


def questions_without_end(stage):
    server = stage.serve()
    with stage.attack(server):
        clients.questions(server.access(), run(1, 2000), sessions=4, seconds=3.0)


def streams_that_stop(stage):
    """With 256 slots each of three engines may have five at any time: a prompt of the honest one,
    and the newcomer's. Of fewer it gets two while the other one has five."""
    slots = 256
    server, port = open_port(stage, ram_bytes=slots * SLOT, **NO_NVME)
    with stage.attack(server), clients.half_sent(clients.far(port), run(3, 300)) as got:
        stage.must(got > slots // 2, "one client may have most of what nobody needs")
        stage.must(got <= slots - slots // 6, "one client takes the reserve")
        newcomer_gets_in(stage, server)


def newcomer_gets_in(stage, server):
    with attached(server.access(OTHER)) as newcomer:
        stage.must(save(newcomer, run(9, 5, OTHER)) == 5, "a newcomer gets no room")


def other_sizes(stage):
    """Also after a restart, while nobody has come back yet."""
    server, port = open_port(stage, ram_bytes=8 << 20, nvme_bytes=8 << 20)
    stage.visit(server)
    spilled(server, "nvme", CHUNKS)
    sizes = [SLOT + 4096 * number for number in range(1, 28)]
    got = len(clients.greetings(clients.far(port), sizes))
    stage.must(got == 16, f"one client brings {got} sizes")
    got = len(clients.greetings(server.access(), sizes))
    stage.must(got == 23, f"another one gets {got} sizes, not one more: 24")
    server.stop()
    server.start()
    clients.greetings(clients.far(port), sizes)
    with stage.attack(server):
        clients.greetings(clients.far(port), sizes)


def crowd_that_never_greets(stage, host, again):
    server, port = open_port(stage)
    with stage.attack(server), clients.silent_crowd(port, host, 600, again):
        newcomer_gets_in(stage, server)
        for _ in range(10):
            stage.must(clients.greetings(clients.far(port), [SLOT]), "another host does not get in")
    stage.must("have not said who they are; the oldest was closed" in server.said(), "silence")


def workers_without_end(stage):
    """On a host where a server may have 256 descriptors."""
    server, port = open_port(stage)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (256, 256))
    with stage.attack(server), clients.workers_of_one(server.address, port, 300) as got:
        stage.must(got, "no worker gets in")
        newcomer_gets_in(stage, server)
        stage.must(server.ask("GET", "/healthz").status == 200, "the server is not healthy")


def handshakes_without_end(stage):
    port, token = free_port(), stage.folder / "server_token"
    folder = make_certificates(stage.folder)
    token.write_bytes(b"a secret of more than 16 bytes")
    token.chmod(0o600)
    keys = {"server_cert": folder / "ours-host.pem", "server_key": folder / "ours-host.key"}
    server = stage.serve(f"tcp://127.0.0.1:{port}", server_token_file=token, **keys)
    with stage.attack(server):
        begun = clients.handshakes(port, every_s=0.002, seconds=4.0)
    stage.must(begun > 100, f"only {begun} handshakes were begun")
    own = hello(LAYOUT.fingerprint, SLOT, stream=True)
    tls = client_tls(str(folder / "ours.pem"))
    honest = ServerAccess(Address("", "localhost", port), own, token.read_bytes(), tls)
    wait_for(lambda: entered(honest), "another host gets in afterwards", _START_S)


# ---- tenants -------------------------------------------------------------------------------------


def clears_what_is_others(stage):
    stage.must(shutil.which("redis-server"), "there is no redis-server (make redis-server)")
    redis = stage.stack.enter_context(RedisServer())
    share = 64 * Form("kvtier", bytes(8)).room(SLOT)
    server, port = open_port(stage, redis_url=redis.url, redis_bytes=share, **NO_NVME)
    stage.visit(server, "acme")
    spilled(server, "redis", CHUNKS)
    server.stop()
    server.start()
    evil = server.access(OTHER, "evil"), clients.far(port), run(PROMPT, CHUNKS)
    clients.clears(*evil)
    with stage.attack(server, "acme"):
        clients.clears(*evil)


def fills_every_tier(stage):
    server = stage.serve(namespace_percent=50)
    stage.visit(server, "acme")
    evil, chunks = server.access(OTHER, "evil"), 2 * RAM_BYTES // SLOT
    stage.must(clients.fills(evil, chunks), "another tenant could save nothing")
    with stage.attack(server, "acme"):
        clients.fills(evil, chunks)


def guesses_salts(stage):
    server = stage.serve()
    salts = [f"salt {number}".encode() for number in range(500)]
    with stage.attack(server):
        found = clients.guesses(server.access(), [PROMPT, *range(CHUNKS - 1)], salts)
    stage.must(not found, f"{found} chunks of another tenant were found")


def reads_behind_chunks(stage):
    """It takes slots that others' chunks have filled, and reads again from NVMe."""
    server, port = open_port(stage, nvme_bytes=2 * RAM_BYTES)
    keys = run(77, 64)
    clients.fills(server.access(OTHER, "acme"), RAM_BYTES // SLOT)
    with stage.attack(server):
        read = clients.ends_of_others(server.access(), port, keys)
        spilled(server, "nvme", RAM_BYTES // SLOT + len(keys))
    server.stop()
    server.start()
    with closing(RemoteTier(clients.far(port))) as reader:
        read += sum(clients.behind(reader, key) for key in keys)
    stage.must(not read, f"{read} bytes of others' chunks were read")


def spilled(server, tier, chunks):
    wait_for(
        lambda: server.metric("kvtier_held_chunks", tier=tier) >= chunks, f"{chunks} in {tier}"
    )


# ---- hostile ends of our own calls ---------------------------------------------------------------


def hostile_bucket(stage, lie):
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
    turncoat.lies["GET"] = lie
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


def endless_list(stage):
    turncoat = bucket.Turncoat()
    turncoat.lies["LIST"] = bucket.endless_page(64 * MIB)
    url, _ = stage.stack.enter_context(bucket.hostile(turncoat))
    stage.stack.enter_context(operated(bucket.environment(url)))
    server = stage.serve(object_url=URL, object_bytes=256 * room(SLOT), **NO_NVME)
    with stage.attack(server):
        time.sleep(1.0)


def slow_nodes(stage):
    url, asked = stage.stack.enter_context(slow_cluster(100))
    server = stage.serve(redis_url=url, redis_bytes=1 << 20, **NO_NVME)
    wait_for(lambda: entered(server.access()), "an engine gets in", _START_S)
    with stage.attack(server):
        time.sleep(1.0)
    stage.must(asked.info, "no node was asked")


def entered(access):
    with suppress(KVTierError, OSError):
        enter(access, _START_S).socket.close()
        return True
    return False


USER, CLIENT, REACHES = (
    "another user of the host",
    "a client with the token",
    "whoever reaches the port",
)
TENANT, BUCKET = "a tenant", "a hostile bucket"
IN_ITS_PROCESS = Bound(p99_ms=200.0, grown_mib=256.0)
"""What is taken whole is taken by the process of the bucket's library, which has a limit."""
OBJECT = partial(hostile_bucket, lie=bucket.endless_object(room(SLOT), 64 * MIB))
REFUSAL = partial(hostile_bucket, lie=bucket.endless_refusal(64 * MIB))
ELSEWHERE = partial(crowd_that_never_greets, host="127.0.0.2", again=True)
HERE = partial(crowd_that_never_greets, host="127.0.0.1", again=False)
ATTACKS = (
    Attack("packed", USER, "12 bodies to the admin port that unpack to 200 MiB", packed_bodies),
    Attack("endless", USER, "8 bodies without end to the admin port", endless_bodies, Bound(200.0)),
    Attack("header", "who reads logs", "the token in headers that are no HTTP", token_in_headers),
    Attack("events", USER, "messages without end to server.events", messages_without_end),
    Attack("lookups", "a router", "3 lookups of 262,144 tokens", long_lookups, Bound(grown_mib=64)),
    Attack("questions", CLIENT, "questions about 2,000 chunks without end", questions_without_end),
    Attack("streams", CLIENT, "300 chunks of which one byte comes", streams_that_stop),
    Attack("sizes", CLIENT, "greetings with 27 other chunk sizes", other_sizes),
    Attack("crowd", REACHES, "600 sockets without a word, again and again", ELSEWHERE),
    Attack("neighbours", REACHES, "the same from an engine's own address", HERE),
    Attack("workers", CLIENT, "300 workers that join with one ticket", workers_without_end),
    Attack("handshakes", REACHES, "500 TLS handshakes a second", handshakes_without_end),
    Attack("ends", TENANT, "reads 4,095 bytes behind 64 chunks of its own", reads_behind_chunks),
    Attack("clear", TENANT, "clears a shared Redis after a restart", clears_what_is_others),
    Attack("fill", TENANT, "saves twice what RAM holds", fills_every_tier),
    Attack("salts", TENANT, "asks for a prompt under 500 salts", guesses_salts),
    Attack("object", BUCKET, "objects of 64 MiB for 8 KiB", OBJECT),
    Attack("refusal", BUCKET, "refusals of 64 MiB", REFUSAL, IN_ITS_PROCESS),
    Attack("page", BUCKET, "a list's page of 64 MiB", endless_list, IN_ITS_PROCESS),
    Attack("cluster", "a hostile Redis", "a map of 100 nodes, each slow", slow_nodes),
)
