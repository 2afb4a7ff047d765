"""Hints of engines on a server's host, as they leave the engine and arrive."""

from __future__ import annotations

from kvtier.store.hints import Hint
from tests.server_process import attached, load, run, save, serving, short_folder, wait_for

RAM_CHUNKS = 32


def test_what_an_engine_says_is_over_leaves_first() -> None:
    with (
        short_folder() as folder,
        serving(nvme_path=folder / "nvme", nvme_bytes=1 << 20) as server,
        attached(server.door()) as client,
    ):
        for prompt in (1, 2):
            load(client, run(prompt, 10))
            save(client, run(prompt, 10))
        wait_for(lambda: client.stats().get("followed_prompts", 0) == 2, "followed")
        client.hint(run(2, 10), Hint(over=True))
        wait_for(lambda: client.stats().get("hints_followed", 0) == 1, "followed")
        assert save(client, run(3, 16)) == 16
        assert client.match(run(1, 10)).ready == 10, "it is the older one, and stays"
        assert client.match(run(2, 10)).ready < 10
