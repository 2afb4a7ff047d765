"""An engine over two hosts, here over loopback: a server on each, of which the second is steered
over TCP and lends its pool to workers beside it."""

from contextlib import ExitStack
from typing import NamedTuple

import pytest

from kvtier.assemble import assemble_hosts
from kvtier.bench.processes.servers import free_port
from kvtier.client.attachment import FarPool, SharedPool
from kvtier.client.connect import Address, ServerAccess, enter, hello, join
from kvtier.client.hosts import HostsPool, slot_of
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, StateError, TierError
from kvtier.core.lookup import NO_LOOKUP
from kvtier.started import Started
from kvtier.testing import content
from tests.child_process import DEADLINE_S, wait_for
from tests.server_process import SLOT, ServerProcess, at_rest, attached, run, short_folder

pytestmark = pytest.mark.usefixtures("patient")

INSECURE = ("--insecure",)
LAYOUTS = [ChunkLayout(fingerprint({"host": host}), 1, 1, (SLOT,)) for host in range(2)]
KEYS = run(1, 4, LAYOUTS[0])


class Two(NamedTuple):
    servers: list[ServerProcess]
    port: int
    """Of the second one."""

    def config(self, **other):
        first, second = f"unix://{self.servers[0].socket}", f"tcp://127.0.0.1:{self.port}"
        patience = int(1000 * DEADLINE_S)
        return Config().with_keys(
            **{"server": f"{first},{second}", "server_timeout_ms": patience} | other
        )

    def name(self, host):
        welcomed = join(self.servers[host].address, None, b"", DEADLINE_S)
        welcomed.socket.close()
        assert not welcomed.descriptors
        return welcomed.welcome.server


@pytest.fixture
def two():
    with ExitStack() as stack:
        one, other = (stack.enter_context(short_folder()) for _ in range(2))
        port = free_port()
        first = stack.enter_context(ServerProcess(one))
        second = ServerProcess(other, f"tcp://127.0.0.1:{port}", flags=INSECURE)
        yield Two([first, stack.enter_context(second)], port)


@pytest.fixture
def hosts(two):
    made = assemble_hosts(Started(two.config()), LAYOUTS, [set(), set()])
    yield made
    made.close()


def joined(two, pool):
    """The second host's pool, as a worker there maps it."""
    assert pool is not None
    far = pool.pools[1]
    assert isinstance(far, FarPool) and far.ticket
    welcomed = join(two.servers[1].address, None, far.ticket, DEADLINE_S)
    welcomed.socket.close()
    assert (welcomed.welcome.slots, welcomed.welcome.slot_bytes) == (far.slots, far.slot_bytes)
    return SharedPool(far.slots, far.slot_bytes, *welcomed.descriptors)


def parts(lease, far):
    """Each host's part of each chunk in the lease, and what it must be."""
    assert isinstance(lease.pool, HostsPool)
    mapped = lease.pool.pools[0], far
    for key, number in zip(lease.keys, lease.slots, strict=False):
        for host, pool in enumerate(mapped):
            slot = slot_of([each.slots for each in lease.pool.pools], number, host)
            if slot is not None:
                named = ChunkKey(bytes([host]) + key[1:])
                yield pool.view(slot), content(named, SLOT)


def save(hosts, far, keys=KEYS):
    with hosts.save(keys) as lease:
        for view, bytes_ in parts(lease, far):
            view[:] = bytes_
        lease.commit()
    hosts.stats()  # a commit has no answer, and this one comes after it
    return len(lease.keys)


def load(hosts, far, keys=KEYS):
    with hosts.load(keys) as lease:
        wait_for(lambda: lease.poll().coming == 0, "nothing is coming any more")
        for view, bytes_ in parts(lease, far) if lease.ready else ():
            assert view == bytes_, "a byte that was not saved there"
        return lease.ready


def test_a_host_that_lost_its_chunks_is_filled_again(two, hosts):
    far = joined(two, hosts.pool)
    assert save(hosts, far) == len(KEYS)
    far.close()
    two.servers[1].kill()
    assert hosts.lookup(KEYS) == NO_LOOKUP
    assert hosts.save(KEYS).keys == [] and hosts.load(KEYS).poll().ready == 0
    two.servers[1].start()
    wait_for(lambda: hosts.pool is not None, "both servers are there")
    far = joined(two, hosts.pool)
    assert load(hosts, far) == 0
    assert save(hosts, far) == len(KEYS) == load(hosts, far)
    far.close()


def test_while_a_host_is_stopped_all_are_misses_and_nothing_is_left_of_what_it_began(
    two, hosts, monkeypatch
):
    far = joined(two, hosts.pool)
    assert save(hosts, far) == len(KEYS)
    more = run(2, 3, LAYOUTS[0])
    with two.servers[1].paused(), monkeypatch.context() as changed:
        changed.setattr(hosts._stores[1], "_timeout_s", 0.05)
        for _ in range(3):
            assert hosts.save(more).keys == []
            assert hosts.lookup(KEYS) == NO_LOOKUP
            assert hosts.load(KEYS).poll().ready == 0
    assert hosts.counts["unanswered"] == 1 + 8, "only the first question is waited for"
    wait_for(lambda: load(hosts, far) == len(KEYS), "it has caught up")
    hosts.check(idle=True)
    assert save(hosts, far, more) == len(more)
    far.close()


def test_slots_of_a_lost_scheduler_stay_until_its_worker_has_let_go(two, hosts):
    lease, far = hosts.save(KEYS), joined(two, hosts.pool)
    assert len(lease.slots) == len(KEYS)
    hosts.close()
    with attached(two.servers[1].access(LAYOUTS[1])) as other:
        wait_for(lambda: _refused(two, lease), "the server has noticed")
        with pytest.raises(StateError):
            other.check(idle=True)
        far.close()
        at_rest(other)


def _refused(two, lease):
    assert isinstance(lease.pool, HostsPool)
    try:
        joined(two, lease.pool).close()
    except TierError as error:
        return "no engine steers with this ticket" in str(error)
    return False


def test_a_ticket_lets_nobody_in_over_tcp_and_a_made_up_one_nobody_at_all(two, hosts):
    assert hosts.pool is not None
    far = hosts.pool.pools[1]
    assert isinstance(far, FarPool)
    with pytest.raises(ConfigError, match="join is for Unix sockets"):
        join(Address("", "127.0.0.1", two.port), None, far.ticket, DEADLINE_S)
    with pytest.raises(TierError, match="no engine steers with this ticket"):
        join(two.servers[1].address, None, bytes(32), DEADLINE_S)
    with pytest.raises(TierError, match="no engine steers with this ticket"):
        join(two.servers[0].address, None, far.ticket, DEADLINE_S)


def test_joins_with_one_ticket_are_counted(two, hosts):
    pools = [joined(two, hosts.pool) for _ in range(64)]
    with pytest.raises(TierError, match="64 workers of this engine have the pool mapped"):
        joined(two, hosts.pool)
    pools.pop().close()

    def joins_again():
        try:
            pools.append(joined(two, hosts.pool))
        except TierError:
            return False
        return True

    wait_for(joins_again, "the server has noticed that one let go")
    for pool in pools:
        pool.close()


def test_who_steers_gets_no_descriptors(two):
    own = hello(bytes(32), SLOT, stream=False, steers=True)
    welcomed = enter(ServerAccess(Address("", "127.0.0.1", two.port), own))
    assert welcomed.descriptors == [] and len(welcomed.welcome.ticket) == 32
    welcomed.socket.close()


def test_who_steers_alone_can_keep_nothing_of_what_lay_in_a_slot(two, hosts):
    with hosts.save(KEYS) as lease:
        lease.commit()
    hosts.stats()
    with attached(two.servers[1].access(LAYOUTS[1])) as other:
        assert other.lookup([own for _, own in hosts._named(KEYS)][1]).known == 0
        at_rest(other)


def test_two_addresses_of_one_server_end_the_start(two):
    with ExitStack() as stack:
        folder, port = stack.enter_context(short_folder()), free_port()
        server = ServerProcess(folder, f"tcp://127.0.0.1:{port}", flags=INSECURE)
        both = Two([stack.enter_context(server)], port)
        with pytest.raises(ConfigError, match="which are one server, expected one on each host"):
            assemble_hosts(Started(both.config()), LAYOUTS, [set(), set()])


def test_addresses_in_another_order_than_the_hosts_end_the_start(two):
    right = [{two.name(0)}, {two.name(1), b""}]
    assemble_hosts(Started(two.config()), LAYOUTS, right).close()
    with pytest.raises(ConfigError, match="is not the server that the workers of node 0 found"):
        assemble_hosts(Started(two.config()), LAYOUTS, right[::-1])
    other = [{two.name(0)}, {b"another one"}]
    with pytest.raises(ConfigError, match="is not the server that the workers of node 1 found"):
        assemble_hosts(Started(two.config()), LAYOUTS, other)
