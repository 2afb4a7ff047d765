"""A tenant who knows another's prompts word by word, and all names but one secret: on every tier it
gets nothing, takes nothing, keeps nobody out, and learns nothing from how long an answer takes."""

import gc
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from kvtier.tiers.redis.layout import Form
from tests.admin_server import AdminServer
from tests.answering import Session
from tests.child_process import wait_for
from tests.nvme_place import FIVE, ONE, TWO, opened, section
from tests.redis_server import RedisServer
from tests.server_process import LAYOUT, SLOT, ServerProcess, attached, load, save, short_folder

pytestmark = pytest.mark.usefixtures("patient")

TOKENS = [7, *range(5)]
TIERS = ["ram", "nvme", pytest.param("redis", marks=pytest.mark.redis)]


def of_namespace(name):
    return replace(
        LAYOUT, fingerprint=fingerprint({"of": LAYOUT.fingerprint.hex(), "namespace": name})
    )


def extra(salt):
    return json.dumps({"lora": None, "salt": salt}, sort_keys=True).encode() if salt else b""


class Tenant(NamedTuple):
    """Who asks: the layout its engine names chunks by, the namespace it claims, the salt it
    knows."""

    layout: ChunkLayout
    namespace: str = ""
    salt: str = ""

    def keys(self, tokens):
        return self.layout.keys(tokens, extra(self.salt))

    def access(self, address):
        stream = not address.path
        return ServerAccess(
            address, hello(self.layout.fingerprint, SLOT, stream=stream, namespace=self.namespace)
        )


SALT, ACME, EVIL = "s3cret", of_namespace("acme"), of_namespace("evil")
VICTIM = Tenant(ACME, "acme", SALT)
HOSTILE = {
    "without its namespace": Tenant(LAYOUT, "", SALT),
    "in a namespace of its own": Tenant(EVIL, "evil", SALT),
    "claims the namespace, names chunks by its own": Tenant(EVIL, "acme", SALT),
    "in the namespace, without the salt": Tenant(ACME, "acme"),
    "in the namespace, with a guess at the salt": Tenant(ACME, "acme", "secret"),
}


class Place(NamedTuple):
    server: ServerProcess
    cache_server: Address
    tier: str
    folder: Path

    def settle(self):
        """Wait until all saves are below. Then leave them only there (nothing to do for RAM)."""
        if self.tier != "ram":
            with attached(VICTIM.access(self.server.address)) as client:
                wait_for(
                    lambda: held(client.stats(), self.tier) >= client.stats()["saved"], "spilled"
                )
            assert self.server.stop() == 0
            self.server.start()


def held(stats, tier):
    return stats.get(f"{tier}_held", 0)


def placed(stack, tier):
    folder, port, slots = stack.enter_context(short_folder()), free_port(), 64
    settings: dict[str, Any] = {}
    if tier == "nvme":
        settings |= section(folder, (60, 4))
    elif tier == "redis":
        redis = stack.enter_context(RedisServer())
        settings |= {
            "redis_url": redis.url,
            "redis_bytes": slots * Form("kvtier", bytes(8)).room(SLOT),
        }
    listen = f"tcp://127.0.0.1:{port}"
    server = ServerProcess(folder, listen, flags=("--insecure",), patient=True, **settings)
    return Place(stack.enter_context(server), Address("", "127.0.0.1", port), tier, folder)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def gets(place, tenant):
    """What a tenant's engine on the server's host is served of the prompt, after it asked from
    another host too."""
    keys = tenant.keys(TOKENS)
    cache_server = RemoteTier(tenant.access(place.cache_server))
    found = cache_server.find(keys)
    into = memoryview(bytearray(SLOT))
    for key in keys[: found or None]:
        assert bool(cache_server.read(key, into)) == bool(found)
    cache_server.close()
    with attached(tenant.access(place.server.address)) as client:
        matched = sum(client.lookup(keys).progress)
        loaded = load(client, keys)
    assert len(loaded) == found and matched in {0, found}
    return loaded


@pytest.mark.parametrize("tier", TIERS)
def test_who_knows_the_prompt_but_not_the_salt_or_namespace_gets_nothing(stack, tier):
    place = placed(stack, tier)
    with attached(VICTIM.access(place.server.address)) as client:
        assert save(client, VICTIM.keys(TOKENS)) == len(TOKENS)
    place.settle()
    nothing: dict[str, list[str]] = {who: [] for who in HOSTILE}
    assert {who: gets(place, tenant) for who, tenant in HOSTILE.items()} == nothing
    assert gets(place, VICTIM) in ([tier] * len(TOKENS), ["ram"] * len(TOKENS))
    assert {who: gets(place, tenant) for who, tenant in HOSTILE.items()} == nothing


@pytest.mark.redis
@pytest.mark.parametrize(
    ("end", "encrypted", "disks"),
    [("kill", False, ONE), ("stop", True, TWO), ("kill", True, FIVE), ("stop", False, FIVE)],
)
def test_after_a_restart_one_tenant_is_erased_and_the_other_is_served(stack, end, encrypted, disks):
    folder, redis = stack.enter_context(short_folder()), stack.enter_context(RedisServer())
    settings = section(folder, disks, 2 * SLOT)
    settings |= {"redis_url": redis.url, "redis_bytes": 1 << 20, "patient": True}
    settings |= {"encryption_key": "7e" * 32} if encrypted else {}
    server = stack.enter_context(AdminServer(folder, **settings))
    other = HOSTILE["in a namespace of its own"]
    theirs, others = VICTIM.keys(TOKENS), other.keys(TOKENS)
    with (
        attached(VICTIM.access(server.address)) as client,
        attached(other.access(server.address)) as neighbour,
    ):
        save(client, theirs)
        save(neighbour, others)
        for tier in ("nvme", "redis"):
            wait_for(lambda tier=tier: held(client.stats(), tier) == 12, f"in {tier}")
    getattr(server, end)()
    server.start()
    with attached(other.access(server.address)) as neighbour:
        done = server.clear(namespace="acme")
        assert (done["complete"], done["chunks"], done["left"]) == (True, len(theirs), 0)
        assert names_in(redis, theirs + others) == [False] * len(theirs) + [True] * len(others)
        assert load(neighbour, others) == ["nvme"] * len(others)
    for lost in ("nothing", "nvme"):
        getattr(server, end)()
        if lost == "nvme":
            for disk in folder.glob("disk*"):
                shutil.rmtree(disk)
        server.start()
        with (
            attached(VICTIM.access(server.address)) as client,
            attached(other.access(server.address)) as neighbour,
        ):
            assert load(client, theirs) == []
            assert load(neighbour, others) == ["redis" if lost == "nvme" else "nvme"] * len(others)


def names_in(redis, keys):
    with redis.admin() as behind:
        names = b" ".join(behind.scan_iter()).decode()
    return [key.hex() in names for key in keys]


def lines(call):
    seen: list[tuple[str, int]] = []

    def trace(frame, event, _):
        seen.append((f"{frame.f_code.co_filename}:{event}", frame.f_lineno))
        return trace

    before = sys.gettrace()
    gc.disable()  # or what others left behind is traced too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return seen


QUESTIONS: dict[str, Callable[[bytes], wire.Question]] = {
    "wire lookup": lambda keys: wire.LookupCall(1, keys),
    "wire known": lambda keys: wire.KnownCall(1, keys),
    "load": lambda keys: wire.LoadCall(1, keys, 0),
    "save": lambda keys: wire.Save(1, keys),
}


@pytest.mark.parametrize("question", [*QUESTIONS, "lookup", "lookup by tier"])
@pytest.mark.parametrize("who", HOSTILE)
def test_asking_for_anothers_prompt_takes_the_same_steps_as_asking_for_one_that_nobody_had(
    tmp_path, question, who
):
    """No clock: the lines that run are the same, one by one. What is compared is a key of 40 bytes
    with a table of all tenants' keys. A key of another namespace or salt differs from its first
    bytes on, wherever it is stored."""
    lane = ManualLane()
    store = Store(Pool(32, SLOT), [(opened(tmp_path, TWO), lane)])
    hostile = Session(store, 2)
    held, asked = VICTIM.keys(TOKENS), HOSTILE[who].keys(TOKENS)
    save(store, held)
    lane.run()
    assert store.stats()["nvme_held"] == len(held)

    def ask(keys):
        if question == "lookup":
            return lambda: store.lookup(keys)
        if question == "lookup by tier":
            return lambda: store.lookup_by_tier(keys)
        made = QUESTIONS[question](wire.joined(keys))
        return lambda: hostile.answer(made)

    lines(ask(HOSTILE[who].keys([11, *range(5)])))  # what is made once is made before
    unknown = HOSTILE[who].keys([12, *range(5)])
    assert lines(ask(asked)) == lines(ask(unknown)) != []
    if question != "save":
        assert lines(ask(asked)) != lines(ask(held)), "the trace does tell a hit from a miss"
    lane.run()
    store.close()


@pytest.mark.vllm
def test_tenants_are_named_here_as_the_connector_names_them():
    layout = importlib.import_module("kvtier.connectors.vllm.layout")
    requests = importlib.import_module("kvtier.connectors.vllm.scheduler_side.requests")
    assert layout.of_namespace(LAYOUT, "acme") == ACME
    for salt in ("", SALT):
        request = SimpleNamespace(
            prompt_embeds=None, lora_request=None, cache_salt=salt, kv_transfer_params=None
        )
        assert requests.request_extra(request, requests.Adapters()) == extra(salt)
