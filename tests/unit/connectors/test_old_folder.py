"""An NVMe folder that was written before chunks were cut into pieces by cache groups.

``tests/data/nvme_before_groups`` was written by commit 4293eeb, the last one before cache groups.
Its ``assemble`` made a Store for the engine of this module, with ``nvme_bytes`` of six pages. Of
the prompt with the tokens 0 to 96 it saved three chunks of one page, each filled with the SHA-256
digest of its key. Then the Store was closed.
"""

import hashlib
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from kvtier.assemble import assemble_store
from kvtier.config.keys import Config
from kvtier.connectors.vllm.layout import chunk_layout, kept
from kvtier.connectors.vllm.metadata import RankLayout
from kvtier.core.chunk import PAGE_BYTES
from kvtier.started import Started
from kvtier.store.store import Store
from tests.child_process import DEADLINE_S
from tests.unit.connectors.test_vllm_identity import engine, model

pytestmark = pytest.mark.vllm

WRITTEN = Path(__file__).parents[2] / "data" / "nvme_before_groups"
TOKENS, CHUNK, CHUNKS = [*range(97)], 32, 3
NAMED = bytes.fromhex("7cf86d118c2584e1d8601261 9312f4d30471dd1936888fc47d1cd1401aeae492")
"""The fingerprint of that engine as that version made it."""


@pytest.fixture
def old(tmp_path):
    """A copy of the folder, with the rights that kvtier gives its files."""
    place = Path(shutil.copytree(WRITTEN, tmp_path / "nvme"))
    place.chmod(0o700)
    for file in place.iterdir():
        file.chmod(0o600)
    return place


@pytest.fixture
def weights(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"weights" * 10_000)
    return place


def laid_out(weights, windows=0):
    """The layout of the engine that wrote the folder, and its geometry. With ``windows``: of an
    engine that has so many groups of windows beside full attention, and so other slots."""
    config = {
        "hidden_size": 64,
        "_name_or_path": str(weights),
        "text_config": {"hidden_size": 64, "_name_or_path": "", "architectures": None},
        "vision_config": {"_name_or_path": "published/vision-tower"},
    }
    given = engine(
        weights, model_config=model(weights, hf_config=SimpleNamespace(to_dict=config.copy))
    )
    head = 32 if windows else 16
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": head, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size=16, **sizes))]
    groups += [
        KVCacheGroupSpec(
            [f"window.{index}"], SlidingWindowSpec(block_size=16, sliding_window=33, **sizes)
        )
        for index in range(windows)
    ]
    shape = {
        "device": "cpu",
        "regions": 1,
        "layers": ["layer"],
        "row_bytes": [2048],
        "interior": [[[2, 1024]]],
        "backends": ["CPU_ATTN"],
    }
    rank = RankLayout(
        tuple(128 * head for _ in groups),
        shape,
        model={"attention": "a", "rotary": "b"},
        weights=None,
    )
    cache = SimpleNamespace(kv_cache_groups=groups)
    layout, geometry, _ = chunk_layout(
        given, cache, kept(cache, with_groups=True), {(0, 0): rank}, CHUNK
    )
    return layout, geometry


@pytest.fixture
def opened():
    """Open a Store on a folder. It is closed at the end."""
    stores: list[Store] = []

    def open_(place, layout):
        config = Config().with_keys(
            chunk_tokens=CHUNK,
            ram_bytes=16 * PAGE_BYTES,
            nvme_path=str(place),
            nvme_bytes=6 * PAGE_BYTES,
        )
        stores.append(assemble_store(Started(config), layout))
        return stores[-1]

    yield open_
    for store in stores:
        assert store.close(10.0)


def warned(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_an_old_folder_is_read(old, weights, opened, caplog):
    layout, geometry = laid_out(weights)
    layout = replace(layout, fingerprint=NAMED)
    store: Store = opened(old, layout)
    run = geometry.run(layout.keys(TOKENS), 0, CHUNK * CHUNKS)
    assert store.lookup(run.wanted).known == CHUNKS
    with store.load(run.keys, run.start) as lease:
        while lease.poll().coming:
            store.wait(DEADLINE_S)
        assert lease.poll().ready == CHUNKS
        assert [bytes(view) for view in lease.views()] == [
            hashlib.sha256(key).digest() * (PAGE_BYTES // 32) for key in run.keys
        ]
    assert store.tiers[0].counts["corrupt"] == 0
    assert not warned(caplog)


def test_what_was_named_by_samples_of_the_weights_is_not_served(old, weights, opened):
    layout, geometry = laid_out(weights)
    store: Store = opened(old, layout)
    run = geometry.run(layout.keys(TOKENS), 0, CHUNK * CHUNKS)
    assert store.lookup(run.wanted).known == 0


def test_an_old_folder_of_a_model_that_has_groups_now_is_emptied_with_one_line(
    old, weights, opened, caplog
):
    """Windows were kept in full length before. A chunk had all layers, and a piece has those of
    one group, so slots have another size."""
    layout, geometry = laid_out(weights, windows=1)
    store: Store = opened(old, layout)
    (line,) = warned(caplog)
    assert "dropped" in line and str(old) in line
    run = geometry.run(layout.keys(TOKENS), 0, CHUNK * CHUNKS)
    assert store.lookup(run.wanted).known == 0
    with store.save(run.keys[:1]) as saving:
        saving.views()[0][:] = bytes(saving.views()[0].nbytes)
        saving.commit()
    assert store.lookup(run.keys[:1]).ready == 1
    assert len(warned(caplog)) == 1
