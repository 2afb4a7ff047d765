"""A real vLLM engine that a test leads: ``python -m tests.integration.served_engine OUT MODEL
[TENSOR_PARALLEL]``.

For every line on standard input it asks all documents once, appends the answers to the JSON list in
OUT, and prints ``round``. It ends with its input. What vLLM prints goes to standard error at once,
whether somebody listens or not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.scenarios import Engine, document


def main() -> None:
    words = os.dup(1)
    os.dup2(2, 1)
    out, model = Path(sys.argv[1]), sys.argv[2]
    more: dict[str, Any] = {"tensor_parallel_size": int(sys.argv[3])} if len(sys.argv) > 3 else {}
    engine = Engine(model, **more)
    rounds: list[Any] = []
    os.write(words, b"ready\n")
    for _ in sys.stdin:
        rounds.append([answer for seed in range(3) for answer in engine.ask([document(seed)])])
        out.write_text(json.dumps(rounds))
        os.write(words, b"round\n")


if __name__ == "__main__":
    main()
