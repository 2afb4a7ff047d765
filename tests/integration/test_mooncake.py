"""kvtier beside Mooncake's store: a real master and a real pool, over TCP, and real vLLM with
KVTierConnector and MooncakeStoreConnector in one MultiConnector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from kvtier.bench.processes.companion import companion
from kvtier.bench.processes.servers import free_port
from tests.conftest import ROOT
from tests.integration.scenarios import CHUNK
from tests.integration.test_vllm import DOCUMENT_HIT
from tests.integration.transfer import EVERY_HIT

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

POOL_MB, BUFFER_MB = 256, 64
START_S, LIMIT_S = 60.0, 400.0
DOCUMENTS = 3


def programs() -> Path:
    """Where Mooncake's programs are, and its Python."""
    places = sorted(ROOT.glob(".venv-peers/mooncake-*/ready"))
    if not places:
        pytest.skip("Mooncake is not installed (make peers)")
    folder = places[-1].parent / "bin"
    command = [str(folder / "python"), "-c", "import mooncake.store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "libibverbs" in done.stderr:
        pytest.skip("Mooncake needs libibverbs1 (make peers)")
    assert done.returncode == 0, done.stderr
    return folder


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def mooncake(folder: Path, bin_folder: Path) -> Iterator[Path]:
    """A master, and a process that owns the pool, so that it outlives engines. The file that an
    engine needs to reach them."""
    master, pool = free_port(), free_port()
    address = f"127.0.0.1:{master}"
    serve = [str(bin_folder / "mooncake_master"), f"--rpc_port={master}"]
    serve += [f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1"]
    own = [str(bin_folder / "mooncake_client"), "--host=127.0.0.1", f"--port={pool}"]
    own += [f"--master_server_address={address}", "--metadata_server=P2PHANDSHAKE"]
    own += ["--protocol=tcp", f"--global_segment_size={POOL_MB} MB"]
    file = folder / "mooncake.json"
    settings = json.loads((ROOT / "deploy/mooncake/mooncake.json").read_text())
    settings |= {"master_server_address": address, "local_buffer_size": f"{BUFFER_MB}MB"}
    file.write_text(json.dumps(settings))
    with (
        companion(serve, {}, lambda: listening(master), folder / "master.log", START_S),
        companion(own, {}, lambda: listening(pool), folder / "pool.log", START_S),
    ):
        yield file


def asked(bin_folder: Path, folder: Path, model: Path, mooncake_file: Path) -> dict[str, Any]:
    """What :mod:`tests.integration.mooncake_vllm` tells, of an engine of its own."""
    folder.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    env |= {
        "MOONCAKE_CONFIG_PATH": str(mooncake_file),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "KVTIER_RAM_BYTES": "64MiB",
        "KVTIER_CHUNK_TOKENS": str(CHUNK),
        EVERY_HIT: "1",
    }
    out = folder / "answers.json"
    module = "tests.integration.mooncake_vllm"
    command = [str(bin_folder / "python"), "-m", module, str(out), str(model)]
    with (folder / "log").open("w") as log:
        subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=LIMIT_S, check=False
        )
    assert out.exists(), (folder / "log").read_text()[-6000:]
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def test_another_engine_hits_mooncake_once_and_kvtiers_ram_from_then_on(tmp_path: Path) -> None:
    bin_folder, model = programs(), make_model(tmp_path / "tiny", "tiny")
    hit = DOCUMENTS * DOCUMENT_HIT
    with mooncake(tmp_path, bin_folder) as file:
        one = asked(bin_folder, tmp_path / "one", model, file)
        two = asked(bin_folder, tmp_path / "two", model, file)
    assert one["first"]["sources"] == {}, "nothing was there"
    assert one["own"]["sources"] == {"device": hit}
    assert one["again"]["sources"] == {"device": hit, "host": hit}, "kvtier is asked first"
    assert two["first"]["sources"].get("host", 0) == 0, "this engine's kvtier was empty"
    (elsewhere,) = two["first"]["sources"].values()
    assert elsewhere == hit, "all of it came from Mooncake"
    assert two["again"]["sources"]["host"] == hit, "kvtier kept what Mooncake had brought"
    tokens = [answer["tokens"] for answer in one["first"]["answers"]]
    for told in (one["own"], one["again"], two["first"], two["own"], two["again"]):
        assert [answer["tokens"] for answer in told["answers"]] == tokens
        assert [answer["cached"] for answer in told["answers"]] == [DOCUMENT_HIT] * DOCUMENTS
