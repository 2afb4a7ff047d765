"""Every vLLM that is here has the hooks that kvtier answers, with the same parameters. Also 0.33,
which has no build for CPUs (``make vllm-next`` sets it up)."""

import json
import os
from pathlib import Path

import pytest

from tests.command import bare, ran
from tests.conftest import vllm_versions
from tests.engine_python import engine_python
from tests.integration.engine_modes import OLDER

HERE: dict[str, Path | None] = (
    {"of TEST_ENGINE_PYTHON": None} if "TEST_ENGINE_PYTHON" in os.environ else vllm_versions()
)
COMPARED = """
import inspect, json, vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base
from vllm.plugins import load_general_plugins
from kvtier.connectors.vllm import versions

load_general_plugins()
ours = KVConnectorFactory.get_connector_class_by_name("KVTierConnector")
wrong = [f"{name}: abstract" for name in getattr(ours, "__abstractmethods__", ())]
for name, hook in vars(Base).items():
    own = inspect.getattr_static(ours, name)
    if name.startswith("_") or own is hook:
        continue
    if isinstance(hook, property) is not isinstance(own, property):
        wrong.append(f"{name}: property or not")
    elif callable(getattr(Base, name)):
        theirs, mine = (inspect.signature(getattr(one, name)) for one in (Base, ours))
        takes_all = any(one.kind is one.VAR_POSITIONAL for one in mine.parameters.values())
        if not takes_all and list(theirs.parameters) != list(mine.parameters):
            wrong.append(f"{name}{mine}: vLLM has {theirs}")
version = vllm.__version__
print(json.dumps([version, wrong, versions.verdict(version)]))
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("version", sorted(HERE))
def test_each_hook_is_answered_as_vllm_calls_it(version):
    done = ran([engine_python(), "-c", COMPARED], bare() | OLDER.environment(HERE[version]))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found, wrong, verdict = json.loads(done.stdout.splitlines()[-1])
    assert found.startswith(version) or HERE[version] is None
    assert wrong == [] and "not tested" not in verdict
