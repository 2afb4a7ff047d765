"""Orphans: an engine's process ends when the one that started it has died.

vLLM's front end ends its engine's processes, unless it is killed itself (``kill -9``, or the kernel
for memory). Then the engine would live on for ever, without clients, with the GPU, the RAM tier and
the NVMe folder, and the next start could have none of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
from functools import partial

from kvtier.core.lanes import Lane

logger = logging.getLogger("kvtier.connectors.vllm")


def end_with_parent() -> None:
    """End this process as vLLM does, by SIGTERM, when its parent has died. Not in a process that
    multiprocessing has not made: there the engine lives in its user's program, whose parent is a
    shell."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        _end()
    except OSError as error:  # a sandbox without pidfds
        logger.debug("the engine's parent is not watched: %s", error)
    else:
        Lane("parent", 1, urgent_bound=1, bound=1).submit(partial(_watch, descriptor))


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)
    _end()


def _end() -> None:
    logger.warning("the process that started this engine has died: the engine ends too")
    os.kill(os.getpid(), signal.SIGTERM)
