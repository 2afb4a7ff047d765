"""vLLM's OpenAI server as the tests lead it: ``python -m tests.integration.mode_server``, with the
server's arguments.

The engine's processes import this file, and are patched then: while the file ``shut`` lies in the
folder ``TEST_FOLDER``, a load is not through, and each that begins adds a byte to ``loads``. Each
step that a data-parallel rank takes only because another one works adds a byte to ``dummies``. The
CPU backend gets the two collectives that a mixture of experts needs under data parallelism.
"""

import os
from pathlib import Path


def _folder():
    return Path(os.environ["TEST_FOLDER"])


def _note(name):
    with (_folder() / name).open("a") as file:
        file.write(".")


def gate():
    """Loads are told to be through as a device's are: later. Those of a CPU are over when their
    call returns."""
    from kvtier.gpu import Copy, PagedBlocks

    class Gated(Copy):
        def done(self):
            return not (_folder() / "shut").exists()

    load = PagedBlocks.load

    def gated(self, jobs):
        load(self, jobs)
        _note("loads")
        return Gated(jobs)

    PagedBlocks.load = gated  # type: ignore[method-assign]
    PagedBlocks.copies_at_once = property(lambda _: False)  # type: ignore[assignment, method-assign]


def note_dummies():
    from vllm.v1.engine.core import EngineCore

    dummy = EngineCore.execute_dummy_batch

    def noted(self):
        _note("dummies")
        dummy(self)

    EngineCore.execute_dummy_batch = noted


def gather_of_unequal_ranks():
    """Experts need these under data parallelism. vLLM's CPU backend has neither: an engine dies in
    its first step."""
    import torch
    from torch import distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, input_, dim=0, sizes=None):
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        counts = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros((max(counts), *input_.shape[1:]))
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatterv(self, input_, dim=0, sizes=None):
        whole = input_.clone()
        distributed.all_reduce(whole, group=self.device_group)
        counts = sizes or [len(whole) // self.world_size] * self.world_size
        begin = sum(counts[: self.rank_in_group])
        return whole[begin : begin + counts[self.rank_in_group]]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


if __name__ == "__mp_main__":
    gather_of_unequal_ranks()
    gate()
    note_dummies()
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
