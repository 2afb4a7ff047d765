"""Homes that lie elsewhere than in the engine's RAM, on a real vLLM: in a server that another
engine has filled, and damaged on NVMe. They come back as they were, and erasure reaches them.

Homes are warmed by ``kvtier warm``. Every blended answer is compared with plain torch.
"""

import json
import secrets

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.tiers.nvme.folder import SLOTS_NAME
from tests.admin_server import administered
from tests.command import kvtier
from tests.integration.spans_server import BLOCK, CHUNK, Served, gap
from tests.integration.test_spans import (
    ANCHOR,
    EXACT,
    asking,
    documents,
    ids,
    model,
    plain,
    prompt,
    spans,
)
from tests.integration.test_spans import warm as warm_in_order
from tests.nvme_place import flip

__all__ = ["model", "plain"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ORDER = [3, 1, 0, 2]
FIRST = 5
ROOM = "64MiB"
STOPS = ("--shutdown-timeout", "10")
"""So that a stop writes what is queued."""


def warm(served, folder, seed):
    anchor, file = folder / "anchor.json", folder / "documents.jsonl"
    anchor.write_text(json.dumps(ids(f"{seed} anchor", ANCHOR)))
    lines = [json.dumps({"tokens": document}) for document in documents(seed)]
    file.write_text("\n".join(lines))
    command = ["warm", "--base-url", served.base_url, "--chunk-tokens", CHUNK]
    done = kvtier(*command, "--anchor", anchor, "--documents", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(lines)} homes" in done.stdout


def expect_blended(served, plain, seed):
    made = prompt(seed, ORDER, "asked")
    answer = served.ask(made.tokens, **asking(made, FIRST))
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert spans(answer)["reused"] == end - FIRST * len(made.ranges[2:])
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, FIRST)) < EXACT


def expect_erased(served, plain, seed):
    """No home is there any more, and the answer is exact."""
    made = prompt(seed, ORDER, "erased")
    answer = served.ask(made.tokens, **asking(made, FIRST))
    told = {"reused": 0, "declined": "missing", "missing": [1, 2, 3, 4]}
    assert spans(answer) == told
    assert gap(answer, plain.full(made.tokens)) < EXACT


def test_homes_that_one_engine_saved_in_a_server_are_another_ones_until_they_are_cleared(
    model, plain, tmp_path
):
    key, token = secret(tmp_path / "key"), secret(tmp_path / "token")
    address = f"tcp://127.0.0.1:{free_port()}"
    given = {"ram_bytes": ROOM, "nvme_bytes": ROOM, "encryption_key_file": key}
    with administered(address, server_token_file=token, **given) as server:
        settings = {"KVTIER_SERVER": address}
        settings |= {"KVTIER_NAMESPACE": "acme", "KVTIER_SERVER_TIMEOUT_MS": "5000"}
        settings |= {"KVTIER_SERVER_TOKEN_FILE": token, "KVTIER_SPANS": "on"}
        served = Served(model, tmp_path, *STOPS, **settings)
        with served:
            warm(served, tmp_path, 21)
        assert server.stop() == 0
        server.start()
        with served:
            expect_blended(served, plain, 21)
            words = ("--namespace", "acme", "--admin", server.url, "--token-file", server.token)
            cleared = server.cli("clear", *words)
            assert cleared.returncode == 0, cleared.stdout + cleared.stderr
            assert server.metric("kvtier_held_chunks", tier="nvme") == 0
            served.forget_all()  # an engine's own RAM is its own
            expect_erased(served, plain, 21)


def test_a_home_that_is_damaged_on_disk_is_computed_in_place(model, plain, tmp_path):
    folder = tmp_path / "nvme"
    settings = {"KVTIER_NVME_PATH": str(folder), "KVTIER_NVME_BYTES": ROOM, "KVTIER_SPANS": "on"}
    served = Served(model, tmp_path, *STOPS, **settings)
    with served:
        warm_in_order(served, 22, [0, 1, 3])
        served.stop()
        (slots,) = folder.rglob(SLOTS_NAME)
        before = slots.read_bytes()
        served.start()
        warm_in_order(served, 22, [2])
        served.stop()
        damaged = [at for at, byte in enumerate(slots.read_bytes()) if byte != before[at]]
        assert damaged
        for at in damaged[:: len(damaged) // 100]:
            flip(slots, at)
        served.start()
        made = prompt(22, [0, 1, 2, 3])
        answer = served.ask(made.tokens, **asking(made))
    end = made.ranges[-1].end // BLOCK * BLOCK
    assert answer.cached == end
    assert spans(answer)["missing"] == [3]
    assert gap(answer, plain.blended(made.tokens, made.ranges, end, missing=[3])) < EXACT


def secret(file):
    file.write_text(secrets.token_hex(32))
    file.chmod(0o600)
    return str(file)
