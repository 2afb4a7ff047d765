"""An arm's companion: ``kvtier serve`` or ``redis-server`` on a Unix socket, or a peer's server with a health page."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvtier.bench.companion import companion
from kvtier.bench.compare.contenders import Contender
from kvtier.bench.servers import ServerError

_START_S, _STOP_S, _POLL_S = 120.0, 20.0, 0.2


@contextmanager
def beside(one: Contender, values: Mapping[str, str], run: Path, log: Path) -> Iterator[None]:
    """Run the arm's companion for as long as the block. Raises ServerError when it does not come up."""
    command = [word.format_map(values) for word in one.beside]
    env = {name: template.format_map(values) for name, template in one.beside_env.items()}
    if one.health is None:
        with companion(command, env, run, log):
            yield
        return
    settings = [f"{name}={value}" for name, value in env.items()]
    with log.open("wb") as out:
        process = subprocess.Popen(["env", *settings, *command], stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_healthy(process, one.health.format_map(values), log)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        process.kill()
        process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise ServerError(f"{url} does not answer. Its log:\n{said}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
