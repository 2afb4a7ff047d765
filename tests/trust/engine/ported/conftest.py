"""Engines for the cases."""

import pytest

from kvtier.bench.model import make_model
from tests.server_process import at_rest
from tests.trust.engine.cells import Cell
from tests.trust.engine.scripted import Scripted


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.extended)], ids=["V2", "V1"])
def v2(request):
    """Whether vLLM's scheduler plans for Model Runner V2."""
    return bool(request.param)


@pytest.fixture
def make(tiny, tmp_path, v2):
    """When the test is over every read was right, and no block, slot or pin is left."""
    made = []

    def one(**cell):
        made.append(Scripted(Cell("case", **{"v2": v2} | cell), tiny, tmp_path))
        return made[-1]

    yield one
    try:
        for engine in made:
            engine.give_back()
            engine.drain()
            assert engine.violations == []
            at_rest(engine.half.store)
    finally:
        for engine in made:
            engine.close()
