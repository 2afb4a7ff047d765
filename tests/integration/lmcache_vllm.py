"""Real vLLM with the real LMCache, without CUDA: ``python -m tests.integration.lmcache_vllm OUT
MODEL``.

LMCache's file is the one that LMCACHE_CONFIG_FILE names. Its copies are
:mod:`kvtier.bench.compare.peers.lmcache_cpu`'s. Asks all documents once, writes the answers as JSON
to OUT, and ends with its input.
"""

import json
import os
import sys
from pathlib import Path

from tests.integration.scenarios import Engine, rounds

CONNECTOR = {
    "kv_connector": "LMCacheOnCPU",
    "kv_connector_module_path": "kvtier.bench.compare.peers.lmcache_cpu",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main():
    answers = rounds(Engine(sys.argv[2], kv_transfer_config=CONNECTOR), times=1)
    aside = Path(sys.argv[1]).with_suffix(".part")
    aside.write_text(json.dumps(answers))
    os.replace(aside, sys.argv[1])
    sys.stdin.read()


if __name__ == "__main__":
    main()
