"""One node of a real vLLM over two hosts: ``python -m tests.integration.hosts_node RANKS MODEL NODE
MASTER:PORT OUT``.

Each starts its host's server first, as ``kvtier launch`` does. Node 0 has the engine, and writes
what it tells to ``OUT``. Node 1 does what ``vllm serve --headless`` does there, until its standard
input ends. Before it ends a node has its server write what is not on disk yet.
"""

import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil

from kvtier.cli import ranks
from kvtier.config.load import load
from tests.integration.mode_scenarios import PROMPT, Watched, thrice
from tests.integration.scenarios import BLOCK, PATCHES, PLENTY, document
from tests.integration.transfer import transfer


def arguments(ranks, node, master):
    """What both nodes are told. ``ranks``: ``tensor`` or ``pipeline``. ``master``: where they
    meet."""
    host, port = master.split(":")
    return {
        f"{ranks}_parallel_size": 2,
        "nnodes": 2,
        "node_rank": node,
        "master_addr": host,
        "master_port": int(port),
        "distributed_executor_backend": "mp",
        "max_num_batched_tokens": 4096,
    }


def lead(model, given):
    """The engine: one prompt, then four at the same time."""
    engine = Watched(model, **given)
    parallel = engine.llm.llm_engine.vllm_config.parallel_config
    assert (parallel.nnodes_within_dp, parallel.local_world_size) == (2, 1)
    told = {
        "one": thrice(engine, lambda seed: engine.ask(documents(seed, 1)), 0),
        "several": thrice(engine, lambda seed: engine.ask(documents(seed, 4)), 1),
    }
    engine.llm.llm_engine.engine_core.shutdown()
    return told | {"most in flight": engine.most_in_flight}


def documents(seed, prompts):
    return [document(seed + number, PROMPT) for number in range(prompts)]


def follow(model, given):
    import vllm
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    engine = {
        "dtype": "float32",
        "max_model_len": 736,
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": PLENTY,
        "seed": 0,
        "kv_transfer_config": transfer(),
    }
    asked = vllm.AsyncEngineArgs(model=model, **engine, **given)
    executor = MultiprocExecutor(asked.create_engine_config(headless=True), monitor_workers=False)
    ends = threading.Thread(target=lambda: (sys.stdin.read(), executor.shutdown()), daemon=True)
    ends.start()
    executor.start_worker_monitor(inline=True)


@contextmanager
def server(node):
    words = ["--nnodes", "2", "--node-rank", str(node)]
    sys.stderr.write(f"{ranks.start_here(ranks.listens_at(words, load().server), os.environ)}\n")
    try:
        yield
    finally:
        for child in psutil.Process().children():
            if child.status() != psutil.STATUS_ZOMBIE and "kvtier.cli.ranks" in child.cmdline():
                child.terminate()
                child.wait()


def main():
    ranks, model, node, master, out = sys.argv[1:6]
    if ranks == "pipeline":
        os.environ["TEST_PATCH"] = "pipeline_buffers"
    given = arguments(ranks, int(node), master)
    with server(int(node)):
        if node == "0":
            Path(out).write_text(json.dumps(lead(model, given)))
        else:
            follow(model, given)


if __name__ == "__mp_main__" and os.environ.get("TEST_PATCH") in PATCHES:
    PATCHES[os.environ["TEST_PATCH"]]()
if __name__ == "__main__":
    main()
