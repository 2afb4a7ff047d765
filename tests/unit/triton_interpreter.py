"""The Triton kernel on CPU tensors: Triton's interpreter runs it, a program at a time."""

import importlib.util
import os
from functools import cache

import pytest


@cache
def interpreted():
    """A second :mod:`kvtier.gpu.kernel`, which Triton's interpreter runs. Skips the test where
    Triton is not installed. Triton looks at the variable when a kernel is declared, so it is set
    for that long only, and the module that a CUDA device is served by is another one."""
    pytest.importorskip(
        "triton.experimental.gluon", exc_type=ImportError
    )  # Triton's own kernels stay as they are
    spec = importlib.util.find_spec("kvtier.gpu.kernel")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return module
