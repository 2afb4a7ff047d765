"""Forecasts of a real server's tiers, as an engine on its host sees them."""

from __future__ import annotations

from kvtier.core.lookup import NO_LOOKUP, Progress
from tests.child_process import wait_for
from tests.server_process import at_rest, attached, load, run, save, serving, short_folder

RAM_CHUNKS = 32


def test_a_servers_forecast_and_what_was_declined_cross_the_wire() -> None:
    with short_folder() as folder, serving(nvme_path=folder / "nvme", nvme_bytes=1 << 20) as server:
        with attached(server.access()) as client:
            keys = run(1, 6)
            assert client.lookup(keys) == NO_LOOKUP._replace(why="cold")
            save(client, keys)
            wait_for(lambda: client.stats().get("nvme_stored", 0) == 6, "written")
            assert client.lookup(keys).steps == [(6, 0.0)]
            for prompt in (
                2,
                3,
            ):  # push the first out of RAM; one save may pin no more than an attachment's share
                assert save(client, run(prompt, RAM_CHUNKS // 2)) == RAM_CHUNKS // 2
            result = client.lookup(keys)
            assert (result.ready, result.known) == (0, 6)
            assert client.lookup(keys).progress == Progress(0, 6)
            seconds = result.steps[-1][1]
            assert seconds is not None and 0 < seconds < 60, "the server has timed its writes"

            at_rest(client)  # a chunk that is being written keeps its slot
            with client.load(keys, most=2) as lease:
                assert lease.keys == keys[:2]
                wait_for(lambda: lease.poll() == Progress(2, 0), "the claimed part, and no more")
            client.decline(keys[2:], "slower")
            wait_for(lambda: client.stats().get("declined_slower", 0) == 4, "counted")
            at_rest(client)
            assert load(client, keys)[2:] == ["nvme"] * 4
        with attached(server.access()) as client, attached(server.access()) as other:
            client.lookup(keys)
            beside = client.most_held
            assert 0 < beside < RAM_CHUNKS, "the slots of a reserve are nobody's"
            with other.save(run(9, RAM_CHUNKS // 2)) as lease:
                client.lookup(keys)
                assert client.most_held == beside - len(lease.slots)
        lost = attached(server.access())
        with lost as client:
            server.kill()
            assert client.lookup(keys) == NO_LOOKUP
            client.decline(keys, "slower")
