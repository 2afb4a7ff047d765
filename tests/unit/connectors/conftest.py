"""vLLM's own Scheduler for the tests that want one."""

import pytest

from kvtier.bench.model import make_model
from tests.unit.real_scheduler import Core


@pytest.fixture(scope="session")
def scheduled_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture
def core(scheduled_model):
    return Core(scheduled_model)
