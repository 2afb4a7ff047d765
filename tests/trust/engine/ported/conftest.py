"""Engines for the cases."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from kvtier.bench.model import make_model
from tests.server_process import at_rest
from tests.trust.engine.cells import Cell

if TYPE_CHECKING:
    from tests.trust.engine.scripted import Scripted


class Make(Protocol):
    """Makes an engine. The words are those of a :class:`Cell`. Which runner it has says ``v2``
    where they do not."""

    def __call__(self, **cell: Any) -> Scripted: ...


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.extended)], ids=["V2", "V1"])
def v2(request: pytest.FixtureRequest) -> bool:
    """Whether vLLM's scheduler plans for Model Runner V2."""
    return bool(request.param)


@pytest.fixture
def make(tiny: Path, tmp_path: Path, v2: bool) -> Iterator[Make]:
    """When the test is over every read was right, and no block, slot or pin is left."""
    made: list[Scripted] = []

    def one(**cell: Any) -> Scripted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM warns while it is imported and configured
            from tests.trust.engine.scripted import Scripted

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
