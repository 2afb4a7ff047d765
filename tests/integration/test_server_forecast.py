"""Forecasts of a real server's tiers, as an engine on its host sees them."""

from __future__ import annotations

from kvtier.load_policy.outlook import NOTHING
from kvtier.store.lease import Match
from tests.server_process import at_rest, attached, load, run, save, serving, short_folder, wait_for

RAM_CHUNKS = 32


def test_a_servers_forecast_and_what_was_declined_cross_the_wire() -> None:
    with short_folder() as folder, serving(nvme_path=folder / "nvme", nvme_bytes=1 << 20) as server:
        with attached(server.door()) as client:
            keys = run(1, 6)
            assert client.forecast(keys) == NOTHING._replace(why="cold")
            save(client, keys)
            wait_for(lambda: client.stats().get("nvme_stored", 0) == 6, "written")
            assert client.forecast(keys).steps == [(6, 0.0)]
            for prompt in (2, 3):  # push the first out of RAM; one save may pin no more than an attachment's share
                assert save(client, run(prompt, RAM_CHUNKS // 2)) == RAM_CHUNKS // 2
            outlook = client.forecast(keys)
            assert (outlook.ready, outlook.known) == (0, 6)
            assert client.match(keys) == Match(0, 6)
            seconds = outlook.steps[-1][1]
            assert seconds is not None and 0 < seconds < 60, "the server has timed its writes"

            with client.load(keys, most=2) as lease:
                wait_for(lambda: lease.poll() == Match(2, 0), "the claimed part, and no more")
            client.decline(keys[2:], "slower")
            wait_for(lambda: client.stats().get("declined_slower", 0) == 4, "counted")
            at_rest(client)
            assert load(client, keys)[2:] == ["nvme"] * 4
        lost = attached(server.door())
        with lost as client:
            server.kill()
            assert client.forecast(keys) == NOTHING
            client.decline(keys, "slower")
