"""vLLM's own Scheduler: an engine's start tries its tiers, and ends for what can never work. An
engine whose front end was killed ends too."""

import logging
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from kvtier.core.errors import KVTierError
from tests.child_process import DEADLINE_S
from tests.unit.real_scheduler import Core

pytestmark = pytest.mark.vllm


@pytest.fixture
def warned(caplog):
    """Where vLLM has set up logging, kvtier's lines go to its handlers alone."""
    caplog.set_level(logging.WARNING, "kvtier.connectors.vllm")
    logging.getLogger("kvtier.connectors.vllm").addHandler(caplog.handler)
    return caplog


@pytest.mark.parametrize(
    ("path", "size", "said"),
    [("/proc/x", "1GiB", "nvme_path=/proc/x"), ("{here}/kv", "1000TiB", "lower nvme_bytes below")],
)
def test_an_engine_does_not_start_with_a_folder_that_can_never_work(
    scheduled_model, tmp_path, monkeypatch, path, size, said
):
    monkeypatch.setenv("KVTIER_NVME_PATH", path.format(here=tmp_path))
    monkeypatch.setenv("KVTIER_NVME_BYTES", size)
    with pytest.raises(KVTierError, match=said):
        Core(scheduled_model)


def test_an_engine_says_what_is_away_and_serves(scheduled_model, monkeypatch, warned):
    monkeypatch.setenv("KVTIER_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("KVTIER_REDIS_BYTES", "1GiB")
    core = Core(scheduled_model)
    assert "redis 127.0.0.1:1 cannot be reached" in warned.text
    core.add(core.request("one", list(range(100, 200))))
    core.run("one")
    core.connector.shutdown()


def test_an_engine_says_that_its_server_is_missing_and_serves(
    scheduled_model, tmp_path, monkeypatch, warned
):
    monkeypatch.setenv("KVTIER_SERVER", f"unix://{tmp_path}/none.sock")
    core = Core(scheduled_model)
    assert f"{tmp_path}/none.sock" in warned.text and "until it can be reached" in warned.text
    core.connector.shutdown()


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
