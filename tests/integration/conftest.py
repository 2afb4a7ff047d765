"""The fork servers that the tests on real engines share."""

import os
from contextlib import ExitStack
from functools import cache

import pytest

from kvtier.bench.model import make_model
from tests.command import SETTINGS
from tests.conftest import ROOT
from tests.engine_python import engine_python, engine_vllm
from tests.integration.engine_modes import OLDER, V1, V1_ASYNC, V2, V2_ASYNC, Mode
from tests.integration.fork_server import ForkServer


@pytest.fixture
def nothing_set(monkeypatch):
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


def in_modes(*modes, extended=()):
    """Run a test in each of these, and in ``extended`` where ``make test-engines`` runs."""
    more = [pytest.param(mode, marks=pytest.mark.extended) for mode in extended]
    return pytest.mark.parametrize(
        "mode", [*modes, *more], indirect=True, ids=lambda mode: mode.name.replace(" ", "-")
    )


BOTH_RUNNERS = pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(mode, marks=pytest.mark.core) for mode in (V2_ASYNC, V1)),
        *(pytest.param(mode, marks=pytest.mark.extended) for mode in (V1_ASYNC, V2)),
    ],
    indirect=True,
    ids=lambda mode: mode.name.replace(" ", "-"),
)
"""What ``make test`` shows on real engines. ``make test-all`` runs the next ones too."""
EVERY_MODE = in_modes(V2_ASYNC, extended=(V1, V1_ASYNC, V2))
"""``make test-all`` runs the first."""
EXTENDED = in_modes(extended=(V2_ASYNC, V1, V1_ASYNC, V2))
V1_FIRST = in_modes(V1, extended=(V2_ASYNC, V1_ASYNC, V2))
"""Many tokens: a step takes ten times as long in Triton's interpreter, so ``make test`` has V1."""


@pytest.fixture(scope="session")
def mode(request):
    """How the engines of a test run. What the tests' vLLM is too old for is skipped: it runs in its
    own way, where V1 is asked for or nothing."""
    asked: Mode | None = getattr(request, "param", None)
    if _knows_modes():
        return asked or V2_ASYNC
    if asked not in (None, V1):
        pytest.skip(f"{asked.name} is for vLLM 0.32 and later")
    return OLDER


@pytest.fixture(scope="session")
def forks():
    """``forks(mode)``: the fork server of the vLLM in .venv in a mode, or of the older one, started
    when first asked for. ``TEST_ENGINE_VLLM`` names the folder of another vLLM to take in the place
    of .venv's."""
    with ExitStack() as running:

        @cache
        def started(mode):
            vllm = _given()
            if mode is OLDER and _knows_modes():
                found = sorted((ROOT / ".venv-old").glob("vllm-*"))
                if not found:
                    pytest.skip("the older vLLM is not installed (make old-vllm)")
                vllm = found[0]
            return running.enter_context(ForkServer(engine_python(), mode, vllm))

        yield started


def _given():
    given = os.environ.get("TEST_ENGINE_VLLM")
    return ROOT / given if given else None


def _knows_modes():
    given = _given()
    version = given.name.removeprefix("vllm-") if given else engine_vllm()
    return tuple(map(int, version.split(".")[:2])) >= (0, 32)
