"""One node of a real vLLM over two hosts: ``python -m tests.integration.hosts_node MODEL RANK
PORT``.

Rank 1 does what ``vllm serve --headless`` does there, in namespaces of its own: it sees no process
and no shared memory of the first host. Each node starts its own server first, as ``kvtier launch``
does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kvtier.cli import hosts
from kvtier.config.load import load

ASKED = 2
"""How often the prompt is asked, each time with nothing in vLLM's own cache."""


def arguments(model: str, rank: int, port: int) -> dict[str, Any]:
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
    }
    return {
        "model": model,
        "dtype": "float32",
        "max_model_len": 736,
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 64,
        "seed": 0,
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "distributed_executor_backend": "mp",
        "kv_transfer_config": transfer,
    }


def follow(given: dict[str, Any]) -> None:
    """The workers of the second host, until the first one ends."""
    import vllm
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = vllm.AsyncEngineArgs(**given).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def lead(given: dict[str, Any]) -> None:
    """The engine. It prints an answer a line, with how many tokens were cached."""
    from vllm import LLM, SamplingParams

    from tests.integration.scenarios import document

    engine = LLM(**given)
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(ASKED):
        (one,) = engine.generate([{"prompt_token_ids": document(0)}], parameters, use_tqdm=False)
        told = {"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens}
        sys.stdout.write(f"ANSWER {json.dumps(told)}\n")
        sys.stdout.flush()
        engine.reset_prefix_cache()


def main() -> None:
    """See the module's text."""
    model, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    listen = hosts.listens_at(["--nnodes", "2", "--node-rank", str(rank)], load())
    sys.stderr.write(f"{hosts.start(listen, os.environ)}\n")
    given = arguments(model, rank, port)
    follow(given) if rank else lead(given)


if __name__ == "__main__":
    main()
