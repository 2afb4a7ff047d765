"""An engine's process whose front end was killed ends, and its folder is free."""

import os
import select
import signal
import subprocess
import sys
import textwrap

from tests.child_process import DEADLINE_S

ENGINE = """
import multiprocessing, os, signal, sys, time

def engine(method):
    from kvtier.connectors.vllm.scheduler_side.orphans import end_with_parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as vLLM does
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    child = context.Process(target=engine, args=(sys.argv[1],))
    child.start()
    time.sleep(600)
"""
ALONE = """
import os, signal, subprocess, sys
from kvtier.connectors.vllm.scheduler_side.orphans import end_with_parent
end_with_parent()
import threading
print(threading.active_count())
"""


def test_an_engine_ends_when_its_front_end_was_killed(tmp_path):
    script = tmp_path / "front_end.py"
    script.write_text(textwrap.dedent(ENGINE))
    for method in ("spawn", "fork"):
        command = [sys.executable, str(script), method]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
            assert front.stdout is not None
            pid = int(front.stdout.readline())
            ended = select.poll()
            descriptor = os.pidfd_open(pid)
            ended.register(descriptor, select.POLLIN)
            os.kill(front.pid, signal.SIGKILL)
            assert ended.poll(1000 * DEADLINE_S), "it lives on without its front end"
            os.close(descriptor)


def test_an_engine_in_its_users_own_process_has_no_parent_to_watch():
    """There the parent is a shell, which may end as it likes."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
