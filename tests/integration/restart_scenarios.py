"""An engine that is killed, and one that is started after it: ``NAME OUT MODEL``, see
:mod:`tests.integration.scenarios`."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.child_process import wait_for
from tests.integration.scenarios import BLOCK, Engine, document

CHUNKS = 32
PROMPTS = [document(seed, CHUNKS * BLOCK + 1) for seed in (5, 6)]


def engine(model):
    return Engine(model, blocks=100, max_model_len=1_100)


def filled(model, out):
    one = engine(model)
    answers = one.ask(PROMPTS[:1]) + one.ask(PROMPTS[1:])
    core: Any = one.llm.llm_engine.engine_core  # in this process
    store = core.engine_core.scheduler.connector._scheduler.store
    wait_for(lambda: store.stats().get("nvme_held", 0) >= CHUNKS * len(PROMPTS), "written")
    time.sleep(0.2)  # what was learned is written beside it, and may be missing as well
    out.write_text(json.dumps(answers))
    os.kill(os.getpid(), signal.SIGKILL)


def asked(model, out):
    """The first prompts after the start, one after the other."""
    one = engine(model)
    answers = [answer for prompt in PROMPTS for answer in one.ask([prompt])]
    out.write_text(json.dumps(answers))


def main():
    name, out, model = sys.argv[1:4]
    {"filled": filled, "asked": asked}[name](model, Path(out))


if __name__ == "__main__":
    main()
