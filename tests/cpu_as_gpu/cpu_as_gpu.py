"""A vLLM plugin for tests: vLLM's CPU backend, run as vLLM runs on GPUs by default.

Its folder lies on PYTHONPATH, and vLLM finds it by the entry points in ``cpu_as_gpu-1.dist-info``
beside this file. The environment of every process of an engine says what it does:

``CPU_AS_GPU_ASYNC=1``: async scheduling stays as asked. None, vLLM's default, means on.

``CPU_AS_GPU_V2=1``: Model Runner V2, whose Triton kernels run in Triton's interpreter.
``TRITON_INTERPRET=1`` has to be set beside it before Python starts, because torch imports Triton
before any plugin.

``CPU_AS_GPU_TOLD``: a file in which the engine's processes tell what they run.

vLLM asks for the platform when ``vllm.platforms.current_platform`` is first used, which is before
``vllm.triton_utils`` decides about Triton. The general plugin runs in the front end, the engine
core and each worker.
"""

import os
from pathlib import Path


def platform():
    """The name of the platform's class, or None for vLLM's own."""
    if _v2():
        assert os.environ.get("TRITON_INTERPRET") == "1", "to be set before Python starts"
        _give_triton_a_backend()
    elif os.environ.get("CPU_AS_GPU_ASYNC") != "1":
        return None
    return "cpu_as_gpu_platform.AsGpu"


def patch():
    """Take torch's version of what the interpreter cannot run, a copy that it runs quickly, and
    tell what runs."""
    if file := os.environ.get("CPU_AS_GPU_TOLD"):
        from cpu_as_gpu_told import tell  # type: ignore[import-not-found]

        tell(Path(file))
    if _v2():
        from vllm.v1.sample.ops import topk_topp_sampler
        from vllm.v1.worker import mamba_utils

        # _topk_topp: 'int' object has no attribute 'to'
        topk_topp_sampler.HAS_TRITON = False
        # The programs that share the copy of a state: interpreted, they run one after the other.
        mamba_utils._TEMPORAL_TILES = 1


def _v2():
    return os.environ.get("CPU_AS_GPU_V2") == "1"


def _give_triton_a_backend():
    """Triton has none for CPUs. vLLM looks for one by name only, and the interpreter needs
    none."""
    from triton import backends
    from triton.runtime import interpreter

    class Interpreted:
        @staticmethod
        def is_active():
            return False

    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=Interpreted))
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask):
        """Drafts by n-gram have masks of integers."""
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(self, pointers, mask, *more):
        return load(self, pointers, as_bool(mask), *more)

    def masked_store(self, pointers, value, mask, *more):
        return store(self, pointers, value, as_bool(mask), *more)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
