"""Real clusters and a real Sentinel, as an operator has them: by ``redis_url``, through ``kvtier
serve`` and a client, and through the commands."""

import json
import subprocess
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.cli.main import main
from kvtier.tiers.redis.servers import slot_of
from tests.child_process import wait_for
from tests.redis_server import RedisServer, cluster_url, redis_cluster, redis_sentinel
from tests.server_process import SLOT, ServerProcess, attached, load, run, save, short_folder

pytestmark = [pytest.mark.redis, pytest.mark.slow]

CHUNKS = 24
RUNS = [run(prompt, 1) for prompt in range(CHUNKS)]
"""Runs of one chunk each: they lie on all nodes, and none hides another."""


@pytest.fixture(scope="module")
def nodes():
    """Nodes that serve what they have while another one is down."""
    with redis_cluster(cluster_require_full_coverage="no", maxmemory="8gb") as servers:
        yield servers


@pytest.fixture(autouse=True)
def empty(request):
    """A test finds no chunks of the test before."""
    for server in request.getfixturevalue("nodes") if "nodes" in request.fixturenames else ():
        with server.admin() as admin:
            admin.flushall()


@contextmanager
def served(url, *, patient=True, ram_bytes=8 * SLOT):
    """A kvtier server whose RAM holds few of the chunks."""
    with short_folder() as folder:
        few: dict[str, Any] = {"ram_bytes": ram_bytes, "redis_bytes": "32MiB"}
        with ServerProcess(folder, patient=patient, redis_url=url, **few) as server:
            yield server


def saved(client, runs=RUNS, already=0):
    """Save the runs, in steps that RAM has room for, until Redis has them all."""
    for index, keys in enumerate(runs):
        save(client, keys)
        wait_for(lambda done=already + index + 1: held(client) >= done, "Redis has it")


def held(client):
    return client.stats().get("redis_held", 0)


def had(client, runs=RUNS):
    return [index for index, keys in enumerate(runs) if load(client, keys)]


def on_node(server):
    with server.admin() as admin:
        nodes = admin.execute_command("CLUSTER NODES").values()
        (mine,) = [node for node in nodes if "myself" in node["flags"]]
    slots = {slot for first, last in mine["slots"] for slot in range(int(first), int(last) + 1)}
    return {index for index, (key,) in enumerate(RUNS) if slot_of(key.hex().encode()) in slots}


def test_a_server_shares_a_cluster_and_a_node_that_dies_takes_its_own_chunks_only(nodes):
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
    theirs = on_node(nodes[2])
    others = set(range(CHUNKS)) - theirs
    assert theirs and others
    with served(url) as server, attached(server.access()) as client:
        saved(client)
    with served(url, patient=False) as server, attached(server.access()) as client:

        def all_had():
            return had(client) == list(range(CHUNKS))

        def only_theirs_are_away():
            found = set(had(client))
            in_ram = {index for index, keys in enumerate(RUNS) if client.lookup(keys).ready}
            return others <= found and not theirs & found - in_ram

        wait_for(all_had, "found by a server that starts, with one seed dead")
        with nodes[2].paused():
            wait_for(only_theirs_are_away, "its chunks are away, and the others go on")
        wait_for(all_had, "away is not lost: they are back")
        nodes[2].kill()
        wait_for(only_theirs_are_away, "its chunks are away again")
        nodes[2].start()
        prompts = count(100)
        wait_for(
            lambda: save(client, run(next(prompts), 1)) == 1 and dbsize(nodes[2]) > 0,
            "it is written to",
        )


def dbsize(server):
    with server.admin() as admin:
        return int(admin.dbsize())


@contextmanager
def watched_pair():
    """A primary, its replica, and the URL by which a Sentinel is asked. One of its two seeds is
    down."""
    with ExitStack() as stack:
        primary = stack.enter_context(RedisServer(maxmemory="64mb"))
        replica = stack.enter_context(
            RedisServer(maxmemory="64mb", replicaof=f"127.0.0.1 {primary.port}")
        )
        with primary.admin() as admin:
            wait_for(
                lambda: (
                    "state=online" in str(admin.execute_command("INFO", "replication"))
                    or admin.info("replication").get("slave0", {}).get("state") == "online"
                ),
                "replicated",
            )
        port = stack.enter_context(redis_sentinel(primary, "main"))
        yield primary, replica, f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main"


def test_a_failover_by_sentinel_is_followed():
    with (
        watched_pair() as (primary, replica, url),
        served(url) as server,
        attached(server.access()) as client,
    ):
        saved(client)
        wait_for(lambda: dbsize(replica) == dbsize(primary), "replicated")
        wait_for(lambda: knows_replica(url), "Sentinel knows the replica")
        primary.kill()
        wait_for(lambda: had(client) == list(range(CHUNKS)), "the promoted replica serves")
        stored = held(client)
        prompts = count(200)
        with replica.admin() as admin:
            assert admin.info("replication")["role"] == "master"
        wait_for(
            lambda: save(client, run(next(prompts), 1)) == 1 and held(client) > stored,
            "and is written to",
        )


def knows_replica(url):
    port = url.rpartition(":")[2].partition("/")[0]
    told = subprocess.run(
        ["redis-cli", "-p", port, "SENTINEL", "REPLICAS", "main"], capture_output=True, check=True
    )
    return b"127.0.0.1" in told.stdout


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a command with this redis_url. Returns its status, and what it printed."""

    def run_(url, *words):
        monkeypatch.setenv("KVTIER_REDIS_URL", url)
        monkeypatch.setenv("KVTIER_RAM_BYTES", "64MiB")
        capfd.readouterr()
        status = main(list(words))
        return status, capfd.readouterr().out

    return run_


def test_doctor_plan_and_config_know_a_cluster(nodes, command):
    url = cluster_url(nodes)
    _, told = command(url, "doctor", "--no-engine", "--json")
    found = {finding["check"]: finding for finding in json.loads(told)["findings"]}
    assert found["redis"]["state"] == "ok" and "maxmemory 24 GiB" in found["redis"]["seen"], found[
        "redis"
    ]
    assert found["self-test redis"]["state"] == "ok", found["self-test redis"]
    _, told = command(url, "plan", "--redis", url, "--no-measure", "--ram", "210GiB", "--json")
    values = json.loads(told)["values"]
    assert 20 << 30 < values["redis_bytes"] <= 0.9 * (24 << 30), "of all nodes together"
    assert values["redis_url"] == url
    _, told = command(url, "config")
    assert url in told
