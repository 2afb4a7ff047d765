"""Real vLLM engines over one server: the second hits what the first saved."""

from typing import Any

import pytest

from tests.integration.conftest import EVERY_MODE
from tests.integration.test_vllm import DOCUMENT_HIT, assert_same, hits, start
from tests.server_process import serving


@pytest.mark.vllm
@pytest.mark.slow
@EVERY_MODE
def test_a_second_engine_hits_what_the_first_saved(forks, mode, tiny, tmp_path):
    with serving(ram_bytes="64MiB") as server:
        at: dict[str, Any] = {"server": server.address, "server_timeout_ms": 5000}
        one, two = (
            start(forks(mode), "scenarios plain", tmp_path / f"{name}.json", tiny, at)
            for name in ("one", "two")
        )
    assert_same(two[:3], one[3:])
    assert hits(one) == [0] * 3 + [DOCUMENT_HIT] * 3 and hits(two) == [DOCUMENT_HIT] * 6
    assert [answer["tokens"] for answer in one[:3]] == [answer["tokens"] for answer in one[3:]]
