"""A process that a test starts, waits for, pauses, stops and kills."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = float(os.environ.get("TESTS_DEADLINE_S", "120"))
"""The bound of waits in tests. It is reached where something is broken, and not where a host is
slow or has much else to do. Mutants, which break things, set a shorter one."""


def wait_for(condition, what, deadline_s=DEADLINE_S):
    """Return when ``condition`` holds. AssertionError when it does not in time."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s} s: {what}"
        time.sleep(0.002)


def most_lines(lines, seconds, begun):
    """The most lines of a log that a bound of so many in so many seconds has let through since
    ``begun``, a monotonic time."""
    return lines * (1 + int((time.monotonic() - begun) // seconds))


def _stands(thread):
    """Whether a thread is stopped, or has ended. ``thread``: its ``stat`` in /proc."""
    try:
        return thread.read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True


class ChildProcess:
    """Use as a context manager. A subclass says what is run and when it answers.

    Args:
        log: where the process's output goes. A later start adds to it.
        env: the process's environment. None: this process's.
        start_s: seconds until it must answer.
    """

    def __init__(self, log, env=None, start_s=DEADLINE_S):
        self.log = log
        self._env = dict(os.environ if env is None else env)
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None

    def command(self):
        raise NotImplementedError

    def answers(self):
        raise NotImplementedError

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def runs(self):
        return self._process is not None

    @property
    def pid(self):
        return self._running().pid

    def start(self):
        self._process = self._spawn()
        try:
            wait_for(self._ready, f"{self.command()[0]} answers", self._start_s)
        except BaseException:
            self.kill()
            raise

    def _spawn(self):
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command(), env=self._env, stdout=log, stderr=log)

    def stop(self):
        process = self._running()
        process.terminate()
        status = process.wait(DEADLINE_S)
        self._process = None
        return status

    def kill(self):
        """SIGKILL, as a crash. Nothing where none runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self):
        """SIGSTOP. It accepts connections, because the kernel does, and answers nothing."""
        self._running().send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        wait_for(lambda: all(map(_stands, tasks.glob("*/stat"))), "each of its threads stands")

    def resume(self):
        self._running().send_signal(signal.SIGCONT)

    @contextmanager
    def paused(self):
        """Paused for as long as the context lasts."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def said(self):
        return self.log.read_text()

    def _running(self):
        assert self._process is not None, "it does not run"
        return self._process

    def _ready(self):
        assert self._running().poll() is None, self.said()
        return self.answers()


def servers(path):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "serve" in words and f"unix://{path}" in words:
            found.append(int(process.name))
    return found
