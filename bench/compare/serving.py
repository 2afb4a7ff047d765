"""Starts an arm's processes: its vLLM server, and its companion where it has one."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvtier.bench.command import emptied
from kvtier.bench.compare import calls
from kvtier.bench.compare.peers.contenders import Contender, names, rendered
from kvtier.bench.compare.rounds import Serving
from kvtier.bench.long_doc_qa.arms import Arm, Sizes, filled, server_args
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.model import kv_token_bytes, read_config
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.engine import Geometry, connector_args, shared_args
from kvtier.bench.processes.servers import VllmServer, free_port

DTYPE, _DTYPE_BYTES = "bfloat16", 2
BLOCK_TOKENS, CHUNK_TOKENS = 128, 256
_START_S = 300.0


@contextmanager
def serving(one: Contender, model: Path, sizes: Sizes, place: Path) -> Iterator[Serving]:
    """An arm that runs until the end of the block. ``place``: its folder, which is emptied."""
    place = emptied(place.resolve())
    (place / "nvme").mkdir()
    with run_folder() as run, ExitStack() as ends:
        ends.callback(shutil.rmtree, place / "nvme", ignore_errors=True)
        values, aside = names(sizes, place, run, free_port()), None
        if one.yaml is not None:  # JSON is YAML
            (place / "lmcache.yaml").write_text(json.dumps(rendered(one.yaml, values)))
        if one.beside:
            command = [word.format_map(values) for word in one.beside]
            env, ready = filled(one.beside_env, values), partial(listens, run / SOCKET)
            aside = ends.enter_context(companion(command, env, ready, place / "beside.log"))
        first, second = (server(one, model, sizes, values, name) for name in ("server", "second"))
        ends.enter_context(first)
        yield Serving(one, first, second, aside, _calls(place, "server"))


def server(
    one: Contender, model: Path, sizes: Sizes, values: Mapping[str, str], name: str
) -> VllmServer:
    """Not started. ``name``: that of its log, and of the file of its calls."""
    arm = Arm(one.name, one.about, keeps_all_on_gpu=one.keeps_all_on_gpu)
    command = [*shared_args(model.name, DTYPE, BLOCK_TOKENS), "--enforce-eager"]
    command += server_args(arm, sizes)
    env, place = filled(one.env, values), Path(values["place"])
    if one.connector is not None:
        connector = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        connector |= rendered(one.connector, values)
        env[calls.CONNECTOR] = connector.get("kv_connector_module_path", "")
        env[calls.CALLS] = str(_calls(place, name))
        connector["kv_connector_module_path"] = calls.MODULE
        command += connector_args(connector)
    env["VLLM_CPU_KVCACHE_SPACE"] = str(sizes.gpu_gib(arm))
    # with a connector vLLM reserves other cores than without
    env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    return VllmServer(str(model), command, env, place / f"{name}.log", _START_S, one.interpreter)


def sizes_of(work: Workload, model: Path) -> Sizes:
    return Sizes(work, Geometry(BLOCK_TOKENS, CHUNK_TOKENS, token_bytes_of(model)))


def token_bytes_of(model: Path) -> int:
    return kv_token_bytes(read_config(str(model)), _DTYPE_BYTES)


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold this file while an arm runs, on a machine that others use too."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _calls(place: Path, name: str) -> Path:
    return place / f"{name}-calls.jsonl"
