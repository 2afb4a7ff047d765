import warnings
from collections.abc import Iterator

import pytest

from tests.server_process import ServerProcess, serving
from tests.unit.connectors.conftest import scheduled_model
from tests.unit.extensions.vllm_tier.tiering import engine_config

__all__ = ["model", "scheduled_model"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM warns while it is imported and configured
        yield


@pytest.fixture(scope="session")
def model(scheduled_model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine_config(scheduled_model, [])
    return scheduled_model


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(ram_bytes="8MiB") as found:
        yield found
