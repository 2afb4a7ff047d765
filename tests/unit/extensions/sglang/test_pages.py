"""What decides without SGLang: names of pages, hit policies, head groups, copies that end."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvtier.extensions.sglang.engine_identity import DOES_NOT, identity
from kvtier.extensions.sglang.moves import Transfer
from kvtier.extensions.sglang.pages import PoolPages, head_groups, legal_ends

HiCacheRanks = make_dataclass(
    "HiCacheRanks",
    [f"{of}_{what}" for of in ("tp", "pp", "attn_cp", "dcp") for what in ("rank", "size")]
    + ["is_mla_model", "tp_lcm_size"],
)
ENGINE = {"arguments": {"tp_size": 2, "dtype": "auto"}, "files": {"model_path": "ab"}}
PAGES = PoolPages("kv", "page_first", "torch.bfloat16", 64, (512, 512))
RANKS = HiCacheRanks(0, 2, 0, 1, 0, 1, 0, 1, is_mla_model=False, tp_lcm_size=None)


def own(pages=PAGES, ranks=RANKS, engine=ENGINE, classes=("MHATokenToKVPoolHost",)):
    return pages.chunks(engine, ranks, classes).fingerprint


OTHER_PAGES: Any = {"pool": "indexer", "layout": "page_head", "dtype": "torch.float16"}
OTHER_PAGES |= {"page_tokens": 32, "groups": range(2), "sizes": (256, 768)}
OTHER_RANKS: Any = {"tp_rank": 1, "tp_size": 4, "pp_rank": 1, "attn_cp_rank": 1, "dcp_rank": 1}
OTHER_ENGINES = {"files": {"model_path": "cd"}, "arguments": {"tp_size": 4, "dtype": "auto"}}


@pytest.mark.parametrize(
    "other",
    [
        *({"pages": replace(PAGES, **{name: value})} for name, value in OTHER_PAGES.items()),
        *({"ranks": replace(RANKS, **{name: value})} for name, value in OTHER_RANKS.items()),
        *({"engine": {**ENGINE, name: value}} for name, value in OTHER_ENGINES.items()),
    ],
)
def test_whatever_decides_bytes_is_in_the_fingerprint(other):
    assert own(**other) != own()
    assert own() == own(engine=dict(ENGINE))


def test_ranks_share_what_is_the_same_on_all_of_them():
    one, other = (replace(RANKS, tp_rank=rank, is_mla_model=True) for rank in (0, 1))
    assert own(ranks=one, classes=["MLAPool"]) == own(ranks=other, classes=["MLAPool"])
    assert own(ranks=one) != own(ranks=other), "a draft with heads beside an MLA model"
    assert own(ranks=one, classes=["MLAPool"]) != own(
        ranks=replace(one, tp_size=4), classes=["MLAPool"]
    )
    assert not head_groups(RANKS, "page_head", "kv", 8), "by heads only where SGLang is told to"
    assert not head_groups(replace(RANKS, tp_lcm_size=4), "page_first", "kv", 8)


@given(some.lists(some.booleans(), max_size=12), some.integers(0, 4))
def test_legal_ends_are_those_that_the_policy_says(held, trailing):
    ends = range(1, len(held) + 1)
    assert legal_ends("all_pages", held, trailing) == {end for end in ends if all(held[:end])}
    last = max(1, trailing)
    assert legal_ends("trailing_pages", held, trailing) == {
        end for end in ends if all(held[max(0, end - last) : end])
    }
    assert legal_ends("block_groups", held, trailing) is None


def test_a_transfer_copies_both_ways_and_nothing_once_it_has_ended():
    memory = np.arange(300, dtype=np.uint8)
    at = memory.ctypes.data
    slot = bytearray(b"x" * 256)
    transfer = Transfer(1)
    transfer.pieces = [[(at + 100, 50), (at, 30)]]
    assert transfer.fill(0, memoryview(slot))
    assert bytes(slot) == memory[100:150].tobytes() + memory[:30].tobytes() + bytes(176)
    memory[:] = 0
    assert transfer.take(0, memoryview(slot)) and transfer.copied == [True]
    assert memory[100:150].tolist() == [*range(100, 150)] and [*memory[:30]] == [*range(30)]
    transfer.end()
    memory[:] = 7
    before = bytes(slot)
    assert not transfer.take(0, memoryview(slot)) and not transfer.fill(0, memoryview(slot))
    assert bytes(slot) == before and set(memory.tolist()) == {7}


def test_weights_decide_by_content_and_what_is_unknown_serves_one_start(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"one")
    arguments = {"model_path": str(model), "load_format": "auto", "dtype": "auto", "port": 1}
    assert "start" in identity(arguments), "files that are younger than the engine"
    monkeypatch.setattr("kvtier.extensions.sglang.engine_identity._started", lambda: 1e18)
    one = identity(arguments)
    assert identity({**arguments, "port": 2}) == one and "port" in DOES_NOT
    for name, other in (("dtype", "half"), ("context_length", 4096)):
        assert identity({**arguments, name: other}) != one
    for change in ({"load_format": "dummy"}, {"model_path": "/nowhere/x"}, {"dtype": object()}):
        first, second = (identity({**arguments, **change}) for _ in range(2))
        assert "start" in first and first != second
    assert identity(arguments, replaced=1) != identity(arguments, replaced=1)
    (model / "model.safetensors").write_bytes(b"two")
    two = identity(arguments)
    assert two != one and "start" not in two
    (model / "config.json").write_text('{"auto_map": {"AutoModel": "far/away--code.Model"}}')
    assert "start" in identity({**arguments, "trust_remote_code": True})
