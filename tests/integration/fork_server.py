"""A fork server for engines: ``python -m tests.integration.fork_server``. It imports vLLM once,
which takes longer than most of what the tests do with an engine, and forks a process of its own for
every program that it is asked to run.

A line of JSON on standard input names the ``module`` whose ``main()`` is run, its ``words``, its
``environment`` and the ``log`` for what it prints. It answers with the process's id, and when that
has ended, with its exit status.

:class:`ForkServer` is the other end of the pipes.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.engine_modes import kept

ROOT = Path(__file__).parents[2]
IMPORTED_ONCE = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""A process with several threads must not be forked. Libraries read the number when they are
loaded."""


class ForkServer:
    """Use as a context manager. ``mode``: of all its engines. ``vllm``: the folder of another vLLM
    than Python's own."""

    def __init__(self, python, mode, vllm=None):
        self.mode = mode
        environment = os.environ | _ONE_THREAD | mode.environment(vllm)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            [python, "-m", __name__], cwd=ROOT, env=environment, bufsize=0, **pipes
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()

    def run(self, module, words, environment, log, limit_s):
        """The exit status of ``module``'s ``main()``, which is killed with all its processes after
        ``limit_s``."""
        asked = {
            "module": module,
            "words": list(words),
            "environment": dict(environment),
            "log": str(log),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        pid, ended = int(self._process.stdout.readline()), False
        try:
            ended = bool(select.select([self._process.stdout], [], [], limit_s)[0])
        finally:  # also where the test's own limit ends it: the next answer is the next one's
            if not ended:
                _kill(pid)
            status = int(self._process.stdout.readline())
        return status


def _kill(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def serve(answers):
    """Fork a process for every line. Return in each what it shall run. None in the server itself,
    at the end."""
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"vLLM's import started {len(threads) - 1} threads: it cannot be forked"
    )
    for line in sys.stdin.buffer:
        asked: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if not pid:
            os.close(answers)
            return asked
        os.write(answers, f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(answers, f"{status}\n".encode())
    return None


def become(asked):
    """In the forked process: lead a group of its own, with the environment, the words and the log
    asked for."""
    os.setsid()
    nothing, log = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    )
    for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    mode = kept(os.environ)
    os.environ.clear()
    os.environ.update(asked["environment"] | mode)
    sys.argv[1:] = asked["words"]


def main():
    answers = os.dup(1)
    os.dup2(2, 1)  # where what vLLM's import prints does no harm
    task = serve(answers)
    if task is not None:
        become(task)
        program = importlib.import_module(task["module"])
        sys.modules["__main__"] = (
            program  # processes that vLLM spawns import it, as if it had been started by its name
        )
        sys.exit(program.main())


if __name__ == "__main__":
    main()
