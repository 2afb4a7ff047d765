"""The fork servers that the tests on real engines share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.conftest import ROOT
from tests.engine_python import engine_python
from tests.integration.fork_server import ForkServer

Forks = Callable[[bool], ForkServer]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """``forks(old)``: the fork server of the vLLM in .venv, or of the older one, started when first
    asked for. ``TEST_ENGINE_VLLM`` names the folder of another vLLM to take in the place of
    .venv's."""
    given = os.environ.get("TEST_ENGINE_VLLM")
    with ExitStack() as running:

        @cache
        def started(old: bool) -> ForkServer:
            vllm = ROOT / given if given else None
            if old:
                found = sorted((ROOT / ".venv-old").glob("vllm-*"))
                if not found:
                    pytest.skip("the older vLLM is not installed (make old-vllm)")
                vllm = found[0]
            return running.enter_context(ForkServer(engine_python(), vllm))

        yield started
