"""Workers that a test holds up, or lets fail: ``--worker-extension-cls
tests.integration.spans_faults.Faults``.

The files of the folder ``TEST_FAULTS`` say what goes wrong, on the last rank of several. Each rank
leaves a file there when it has copied, and one when it has begun a pass.
"""

import os
from pathlib import Path

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group

from kvtier.core.errors import LayoutError
from kvtier.extensions.spans.in_place import InPlace
from kvtier.extensions.spans.mover import Mover

_FOLDER = Path(os.environ["TEST_FAULTS"])
_go_on, _copy, _pass = Mover.go_on, Mover._copy, InPlace.__call__


class Faults:
    """vLLM adds it to its worker's class. It imports this module, which is what counts."""


def _is(fault):
    rank = get_tensor_model_parallel_rank()
    return rank == get_tp_group().world_size - 1 and (_FOLDER / fault).exists()


def _left(what):
    (_FOLDER / f"{what}-{get_tensor_model_parallel_rank()}").touch()


def go_on(mover, part, is_time):
    if _is("slow"):
        return []
    ended = _go_on(mover, part, is_time)
    if ended:
        _left("copied")
    return ended


def copy(mover, slot, piece, block_ids):
    _copy(mover, slot, piece, block_ids)
    if _is("torn"):
        raise LayoutError("torn by a test")


def run(in_place, runs, block_ids):
    _left("began")
    _pass(in_place, runs, block_ids)


setattr(Mover, "go_on", go_on)  # noqa: B010 - mypy takes no other form
setattr(Mover, "_copy", copy)  # noqa: B010
setattr(InPlace, "__call__", run)  # noqa: B010
