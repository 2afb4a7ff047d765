"""Engines over several hosts: what is refused, whose parts lie where, and what a worker takes."""

from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig

from kvtier.client.hosts import HostsPool
from kvtier.config.keys import Config
from kvtier.connectors.vllm import layout as hosts
from kvtier.connectors.vllm.metadata import HostPools, Job, Move, PoolAddress, StepMetadata
from kvtier.connectors.vllm.scheduler_side.jobs import Jobs
from kvtier.connectors.vllm.worker_side.pools import OwnHost
from kvtier.core.errors import ConfigError
from kvtier.core.pool import Pool
from tests.unit.connectors.test_vllm_identity import engine, folder
from tests.unit.connectors.test_vllm_layout import cache, laid_out, rank

pytestmark = pytest.mark.vllm

__all__ = ["folder"]

TWO = "unix:///run/kvtier.sock,tcp://b:9600"


def refuse(config, replicas=1, **other):
    many = {"data_parallel_size": replicas, "data_parallel_size_local": 1}
    parallel = ParallelConfig(nnodes=2, tensor_parallel_size=2, **many | other)
    hosts.refuse_hosts(parallel, config.server, spans=config.engine.spans)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Config(), r"nnodes=2: .* 2 hosts.*server_address names 0 \(none\)"),
        (
            Config().with_keys(server="unix:///run/kvtier.sock"),
            r"names 1 .*: set it to 2 addresses",
        ),
        (Config().with_keys(server=f"{TWO},tcp://c:9600"), r"names 3 .*: set it to 2 addresses"),
        (Config().with_keys(server="tcp://a:9600,tcp://b:9600"), "first unix:///path/kvtier.sock"),
        (
            Config().with_keys(server="unix:///a,unix:///b"),
            "unix:///b is on this host, expected tcp://",
        ),
        (Config().with_keys(server=TWO, spans=True), "spans=true is for engines on one host"),
    ],
)
def test_an_engine_over_two_hosts_asks_for_a_server_on_each(config, why):
    with pytest.raises(ConfigError, match=why):
        refuse(config)


def test_context_parallelism_over_hosts_is_refused():
    with pytest.raises(ConfigError, match="not keep with context parallelism"):
        refuse(Config().with_keys(server=TWO), decode_context_parallel_size=2)


def test_an_engine_with_a_server_on_each_host_is_taken():
    refuse(Config().with_keys(server=TWO))


def test_with_data_parallelism_over_two_hosts_each_engine_is_on_one_of_them():
    refuse(Config(), replicas=2)
    with pytest.raises(ConfigError, match=r"names 2 servers .* has one host"):
        refuse(Config().with_keys(server=TWO), replicas=2)


def split(given, ranks, *, replicated=False):
    layout, geometry, _ = laid_out(given, cache(), ranks)
    of = hosts.HostsOf(2, len(ranks) // 2)
    return hosts.by_host(layout, geometry, ranks, of, replicated=replicated)


def test_a_hosts_slot_has_the_parts_of_its_own_ranks_alone(folder):
    ranks = {(0, place): rank(block_bytes=(4096 * (1 + place),)) for place in range(4)}
    (one, other), parts = split(engine(folder), ranks)
    assert (one.rank_block_bytes, other.rank_block_bytes) == ((4096, 8192), (12288, 16384))
    blocks = one.blocks_per_chunk
    assert parts == tuple(((first * blocks, True),) for first in (0, 4096, 0, 12288))


def test_ranks_with_the_same_kv_share_a_part_within_their_host(folder):
    ranks = {(0, place): rank() for place in range(4)}
    layouts, parts = split(engine(folder), ranks, replicated=True)
    assert [one.rank_block_bytes for one in layouts] == [(4096,), (4096,)]
    assert parts == tuple(((0, writes),) for writes in (True, False, True, False))


def test_the_place_of_a_host_and_their_number_are_in_its_fingerprint(folder):
    """Hosts with equal parts may have a tier in common."""
    given, ranks = engine(folder), {(0, place): rank() for place in range(6)}
    whole, geometry, _ = laid_out(given, cache(), ranks)
    by_two, by_three = (
        hosts.by_host(whole, geometry, ranks, hosts.HostsOf(count, 6 // count), replicated=False)[0]
        for count in (2, 3)
    )
    every = [whole, *by_two, *by_three]
    assert len({one.fingerprint for one in every}) == len(every)


def test_a_worker_takes_the_slots_of_its_host_and_leaves_out_what_is_there(tmp_path):
    pools = Pool(3, 4096), Pool(5, 4096)
    both = HostsPool(pools)
    addresses = tuple(PoolAddress(f"/{one.slots}", None, one.slots, 4096, ()) for one in pools)
    where = HostPools("", None, both.slots, both.slot_bytes, (), hosts=addresses)
    slots = [both.joined(pair) for pair in ((2, 4), (None, 0), (1, None))]
    save = Job(1, where, [Move(0, slots, [10, 11, 20, 21, 30, 31])])
    load = Job(2, where, [Move(0, slots[:1], [11], 1)], "r1", 16)
    lost = Job(3, where, [Move(0, [], [0])], "r2", 16)
    told = StepMetadata(where, loads=[load, lost], saves=[save])
    for host, taken, blocks in ((0, [2, 1], [10, 11, 30, 31]), (1, [4, 0], [10, 11, 20, 21])):
        own = OwnHost(Config().with_keys(server=TWO).server, host).part(told)
        assert own.pool == addresses[host] == own.saves[0].pool == own.loads[0].pool
        assert own.saves[0].moves == [Move(0, taken, blocks)]
        assert own.loads[0].moves == [Move(0, [taken[0]], [11], 1)]
        assert own.loads[1].moves == lost.moves, "it fails, and does not end well with nothing"
    for one in pools:
        one.close()


def test_a_hosts_ranks_follow_one_another():
    of = hosts.HostsOf.of(SimpleNamespace(nnodes_within_dp=2, world_size=4))
    assert [of.of_rank(number) for number in range(4)] == [0, 0, 1, 1]


def test_a_job_is_confirmed_by_the_ranks_of_all_hosts(folder):
    ranks = {(0, place): rank() for place in range(4)}
    _, parts = split(engine(folder), ranks)
    assert Jobs(parts, lambda: 0.0).ranks == len(ranks)
