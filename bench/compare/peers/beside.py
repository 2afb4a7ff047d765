"""An arm's companion: ``kvtier serve`` or ``redis-server`` on a Unix socket, or a peer's server
with a health page."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.long_doc_qa.arms import filled
from kvtier.bench.processes.companion import SOCKET, companion, listens
from kvtier.bench.processes.servers import answers

_START_S = 120.0


def beside(
    one: Contender, values: Mapping[str, str], run: Path, log: Path
) -> AbstractContextManager[int]:
    """Run the arm's companion during the block. Raises as
    :func:`kvtier.bench.processes.companion.companion`."""
    command = [word.format_map(values) for word in one.beside]
    env = filled(one.beside_env, values)
    if one.health is None:
        return companion(command, env, partial(listens, run / SOCKET), log)
    return companion(command, env, partial(answers, one.health.format_map(values)), log, _START_S)
