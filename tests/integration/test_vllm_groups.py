"""Models with several KV cache groups on a real vLLM, with and without kvtier: windows, local
attention, states. Equal answers, real hits, from RAM and after a restart from NVMe, and as much KV
memory as without kvtier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.model import make_model
from tests.engine_python import engine_vllm
from tests.integration.conftest import Forks
from tests.integration.test_vllm import assert_same, corrupt, hits, start
from tests.s3_server import S3Server, operated

KINDS = {
    "swa": ["FullAttentionSpec", "SlidingWindowSpec"],
    "gptoss": ["FullAttentionSpec", "SlidingWindowSpec"],
    "window": ["SlidingWindowSpec"],
    "llama4": ["ChunkedLocalAttentionSpec", "FullAttentionSpec"],
    "qwen3next": ["FullAttentionSpec", "MambaSpec"],
}
LESS = pytest.mark.extended
MODELS = [
    "swa",
    "qwen3next",
    *(pytest.param(model, marks=LESS) for model in ("gptoss", "window", "llama4")),
]
LONG = 1280
"""Tokens of a hit of a document where blocks, and so chunks, have 640."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not engine_vllm().startswith("0.32."), reason="groups are kept from vLLM 0.32 on"
    ),
]


class Lives:
    """Runs scenarios. Each is run once."""

    def __init__(self, forks: Forks, factory: pytest.TempPathFactory) -> None:
        self._forks, self._factory, self._seen = forks, factory, dict[Any, Any]()
        self._models = factory.mktemp("models")

    def __call__(
        self, model: str, scenario: str = "life", *, kvtier: bool = True, **config: Any
    ) -> Any:
        call = model, scenario, kvtier, *sorted(config.items())
        if call not in self._seen:
            out = self._factory.mktemp("run") / "answers.json"
            keys: dict[str, Any] | None = {"ram_bytes": "256MiB"} | config if kvtier else None
            if keys is not None and model == "qwen3next":
                keys |= {"chunk_tokens": 640}
            made = make_model(self._models / model, model)
            parallel = scenario == "tensor_parallel"
            told = start(
                self._forks(False),
                f"group_scenarios {scenario}",
                out,
                made,
                keys,
                processes=parallel,
            )
            assert isinstance(told, dict), str(told)[-4000:]
            self._seen[call] = told
        return self._seen[call]


@pytest.fixture(scope="session")
def lives(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return Lives(forks, tmp_path_factory)


def assert_equal(ours: Any, plain: Any, model: str) -> None:
    """Where both have hits of the same length, the answers are equal to the last bit."""
    for part in ("first", "again"):
        assert_same(ours[part], plain[part], tolerance=1e-4 if model == "swa" else 0.0)
    assert [answer["tokens"] for answer in ours["longer"]] == [
        answer["tokens"] for answer in plain["longer"]
    ]


@pytest.mark.parametrize("model", MODELS)
def test_every_group_comes_back_from_ram_and_answers_are_equal(lives: Lives, model: str) -> None:
    ours, plain = lives(model), lives(model, kvtier=False)
    for told in (ours, plain):
        assert told["facts"]["kinds"] == KINDS[model], "the groups under test are in force"
        assert told["facts"]["hybrid"]
    assert_equal(ours, plain, model)
    whole = LONG if model == "qwen3next" else 512
    assert hits(ours["first"]) == [0, 0, 0]
    assert hits(ours["again"]) == [whole] * 3 == hits(plain["again"])
    assert ours["counts"]["loaded_ram"] > 0
    assert not any(name.startswith("missed_corrupt") for name in ours["counts"])


@pytest.mark.parametrize(
    "model", ["swa", pytest.param("qwen3next", marks=LESS), pytest.param("gptoss", marks=LESS)]
)
def test_a_prompt_that_goes_on_is_hit_where_the_answer_before_it_ended(
    lives: Lives, model: str
) -> None:
    ours = lives(model)
    first, second = hits(ours["longer"])
    least = LONG if model == "qwen3next" else 512
    assert first >= least
    assert second >= first
    assert ours["longer"][0]["tokens"] == ours["longer"][1]["tokens"]


@pytest.mark.parametrize(
    "model", [pytest.param("swa", marks=LESS), pytest.param("qwen3next", marks=LESS)]
)
def test_every_group_comes_back_from_nvme_after_a_restart(
    lives: Lives, model: str, tmp_path: Path
) -> None:
    plain, folder = lives(model, kvtier=False), tmp_path / "nvme"
    disk: dict[str, Any] = {"nvme_path": str(folder), "nvme_bytes": "256MiB"}
    lives(model, **disk)
    ours = lives(model, ram_bytes="255MiB", **disk)
    assert hits(ours["first"]) == hits(plain["again"]), "what the engine before has saved"
    assert ours["counts"]["loaded_nvme"] > 0
    assert [one["tokens"] for one in ours["first"]] == [one["tokens"] for one in plain["again"]]
    assert not corrupt(folder)


@pytest.mark.parametrize("model", ["swa", pytest.param("qwen3next", marks=LESS)])
def test_every_group_comes_back_from_a_bucket_on_an_empty_host(
    lives: Lives, model: str, tmp_path: Path
) -> None:
    """RAM and NVMe are new. What the engine before has saved lies in the bucket, every kind."""
    plain = lives(model, kvtier=False)
    shared: dict[str, Any] = {"object_url": "s3://bucket/groups", "object_bytes": "256MiB"}
    with S3Server() as server, operated(server.environment):
        for host in ("one", "other"):
            shared |= {"nvme_path": str(tmp_path / host), "nvme_bytes": "64MiB"}
            ours = lives(model, **shared)
    assert hits(ours["first"]) == hits(plain["again"]), "what the engine before has saved"
    assert ours["counts"]["loaded_object"] > 0
    assert [one["tokens"] for one in ours["first"]] == [one["tokens"] for one in plain["again"]]
    assert not any(name.startswith("missed_corrupt") for name in ours["counts"])


@pytest.mark.extended
def test_two_tensor_ranks_keep_their_parts_of_every_group(lives: Lives) -> None:
    """Not with a state: there vLLM 0.32 has no prefix-cache hits with two ranks on CPUs, with or
    without kvtier."""
    ours = lives("swa", "tensor_parallel")
    plain = lives("swa", "tensor_parallel", kvtier=False)
    assert_equal(ours, plain, "swa")
    assert hits(ours["again"]) == hits(plain["again"])
    assert ours["counts"]["loaded_ram"] > 0


@pytest.mark.extended
@pytest.mark.parametrize("model", ["swa", "gptoss", "llama4"])
def test_an_engine_has_as_much_room_with_kvtier_as_without(lives: Lives, model: str) -> None:
    ours, plain = lives(model, "room"), lives(model, "room", kvtier=False)
    assert ours == plain
    assert ours["hybrid"]
    assert ours["tokens"] > 0
