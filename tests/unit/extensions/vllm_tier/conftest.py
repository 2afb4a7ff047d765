import pytest

from kvtier.bench.processes.servers import free_port
from tests.server_process import serving
from tests.unit.connectors.conftest import scheduled_model

__all__ = ["model", "scheduled_model"]


@pytest.fixture(scope="session")
def model(scheduled_model):
    return scheduled_model


@pytest.fixture(scope="module")
def server():
    tcp = f"tcp://127.0.0.1:{free_port()}"
    with serving(tcp, ram_bytes="8MiB", flags=("--insecure",)) as found:
        yield found


def tcp_address(server):
    (address,) = (word for word in server.command() if word.startswith("tcp://"))
    return str(address)
