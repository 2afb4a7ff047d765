"""What of a request enters its keys besides tokens: adapter by content, salt, media with their
places."""

import json
import os
from collections import UserDict
from concurrent.futures import Future
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.vllm.naming.digests import FileDigests
from kvtier.connectors.vllm.naming.media import MediaNames
from kvtier.connectors.vllm.scheduler_side import requests
from kvtier.core.chunk import ChunkLayout, fingerprint

LAYOUT = ChunkLayout(fingerprint({"model": "test"}), 32, 16, (4096,))
TOKENS = list(range(128))


def image(content, offset, length=8, called=""):
    """An item that vLLM calls by a digest of its content, where nothing else is said."""
    tensor = torch.frombuffer(bytearray(b"picture " + content.encode()), dtype=torch.uint8)
    return SimpleNamespace(
        identifier=called or f"digest of {content}",
        data=UserDict(pixels=tensor),
        mm_position=SimpleNamespace(offset=offset, length=length),
    )


def asked(**other):
    given = {
        "kv_transfer_params": None,
        "prompt_embeds": None,
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**given | {"mm_features": None} | other)


def adapter(folder, content=b"weights", name="adapter", **other):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    given = {"lora_name": name, "lora_int_id": 1, "lora_path": str(folder), "load_inplace": False}
    return SimpleNamespace(**given | other)


def keys(request, adapters=None):
    extra = requests.request_extra(request, adapters or requests.Adapters())
    assert extra is not None
    found = requests.media_extra(request, LAYOUT.chunk_tokens, MediaNames())
    return list(LAYOUT.chain(extra, found).extend(TOKENS))


def media(*features):
    return requests.media_extra(asked(mm_features=features), 32, MediaNames())


class TestMedia:
    def test_every_chunk_that_an_image_touches_has_it(self):
        found = media(image("cat", 30, 40))
        assert set(found) == {0, 1, 2}
        assert set(media(image("cat", 32, 32))) == {1}
        assert set(media(image("cat", 31, 2))) == {0, 1}
        assert set(media(image("cat", 33, 0))) == {1}

    def test_which_image_and_where_it_lies_are_in_the_key(self):
        several = [
            [image("cat", 40)],
            [image("dog", 40)],
            [image("cat", 41)],
            [image("cat", 40), image("dog", 52)],
            [image("dog", 40), image("cat", 52)],
            [],
        ]
        found = [keys(asked(mm_features=features)) for features in several]
        for one, other in combinations(found, 2):
            assert one[1] != other[1]
            assert one[2] != other[2], "what comes after an image has seen it"

    def test_the_order_in_which_media_are_told_is_not(self):
        one, two = [image("cat", 40), image("dog", 52)], [image("dog", 52), image("cat", 40)]
        assert keys(asked(mm_features=one)) == keys(asked(mm_features=two))

    @given(
        st.lists(st.tuples(st.text(max_size=6), st.integers(0, 31)), max_size=3),
        st.lists(st.tuples(st.text(max_size=6), st.integers(0, 31)), max_size=3),
    )
    def test_equal_bytes_mean_equal_media(self, one, other):
        said = [media(*[image(content, at, 1) for content, at in items]) for items in (one, other)]
        assert (said[0] == said[1]) == (sorted(one) == sorted(other))


class TestSaltsAndAdapters:
    def test_neither_is_the_other_and_none_is_nothing(self, tmp_path):
        lora, other = adapter(tmp_path / "a"), adapter(tmp_path / "b", b"others")
        several = [
            asked(),
            asked(cache_salt="a"),
            asked(cache_salt="b"),
            asked(lora_request=lora),
            asked(lora_request=other),
            asked(lora_request=lora, cache_salt="a"),
        ]
        found = [keys(one) for one in several]
        for one, two in combinations(found, 2):
            assert not set(one) & set(two)

    def test_an_adapter_is_its_content_whatever_its_name_and_place(self, tmp_path):
        one, two = adapter(tmp_path / "a"), adapter(tmp_path / "b", name="renamed", lora_int_id=2)
        assert keys(asked(lora_request=one)) == keys(asked(lora_request=two))

    def test_an_adapter_that_changes_under_the_engine_is_left_alone(self, tmp_path):
        adapters, lora = requests.Adapters(), adapter(tmp_path / "a")
        before = keys(asked(lora_request=lora), adapters)
        adapter(tmp_path / "a", b"other weights")
        assert requests.request_extra(asked(lora_request=lora), adapters) is None
        assert requests.request_extra(asked(lora_request=lora), adapters) is None, "nor later"
        lora.load_inplace = True
        after = keys(asked(lora_request=lora), adapters)
        assert not set(before) & set(after)

    def test_one_that_is_written_over_at_the_same_size_is_noticed(self, tmp_path):
        adapters, lora = requests.Adapters(), adapter(tmp_path / "a", b"one")
        keys(asked(lora_request=lora), adapters)
        adapter(tmp_path / "a", b"two")
        os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
        assert requests.request_extra(asked(lora_request=lora), adapters) is None

    @pytest.mark.parametrize("path", ["~/adapter", "acme/adapter", "here"])
    def test_one_is_found_where_vllm_finds_it(self, tmp_path, monkeypatch, path):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        snapshot = tmp_path / "hub" / "models--acme--adapter" / "snapshots" / ("1" * 40)
        place = {"~/adapter": tmp_path / "adapter", "here": tmp_path / "here"}.get(path, snapshot)
        place.mkdir(parents=True)
        refs = tmp_path / "hub" / "models--acme--adapter" / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / "main").write_text("1" * 40)
        found = []
        for content in (b"one", b"other", b"one"):
            lora = adapter(place, content)
            lora.lora_path = path
            found.append(requests.Adapters().identity(lora))
        assert found[0] == found[2] != found[1]

    def test_one_that_the_hub_may_replace_is_this_start_s_own(self, tmp_path, monkeypatch):
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "a")
        )
        lora = adapter(tmp_path / "a")
        lora.lora_path = "acme/adapter"
        adapters = requests.Adapters()
        assert adapters.identity(lora) == adapters.identity(lora) is not None
        assert adapters.identity(lora) != requests.Adapters().identity(lora)

    def test_how_vllm_shall_read_one_is_in_its_name(self, tmp_path):
        one, two = (
            adapter(tmp_path / "a", is_3d_lora_weight=told, of_tomorrow=None)
            for told in (False, True)
        )
        assert requests.Adapters().identity(one) != requests.Adapters().identity(two)

    def test_every_file_of_one_counts(self, tmp_path):
        lora, found = adapter(tmp_path / "a"), []
        for name in ("adapter_config.json", "config.json", "new_embeddings.bin", "README.md"):
            (tmp_path / "a" / name).write_text("{}")
            found.append(requests.Adapters().identity(lora))
        assert len({json.dumps(one) for one in found}) == 3, "but for what people read"


class TestWhileAnAdapterIsRead:
    def test_a_request_waits_and_no_thread_does(self, tmp_path):
        slow, now = SlowDigests(), [0.0]
        names = requests.RequestNames(requests.Adapters(slow, lambda: now[0]))
        request = asked(lora_request=adapter(tmp_path / "a"), mm_features=[])
        assert names.of(request, 32) is None
        assert names.of(request, 32) is None
        slow.future.set_result("read")
        named: Any = names.of(request, 32)
        assert b"read" in named.whole

    def test_not_longer_than_five_seconds(self, tmp_path, caplog):
        now = [0.0]
        names = requests.RequestNames(requests.Adapters(SlowDigests(), lambda: now[0]))
        request = asked(lora_request=adapter(tmp_path / "a"), mm_features=[])
        assert names.of(request, 32) is None
        now[0] = 5.0
        own, again = (names.of(request, 32) for _ in range(2))
        assert own is not None and again is not None
        assert own.whole == again.whole is not None
        assert "this start" in caplog.text


class SlowDigests(FileDigests):
    """Digests of which none comes before the test says so."""

    def __init__(self):
        self.future = Future[str]()

    def begin(self, files, base):
        return self.future


class TestLeftAlone:
    def test_prompts_that_are_embeddings(self):
        assert requests.request_extra(asked(prompt_embeds=object()), requests.Adapters()) is None

    @pytest.mark.parametrize("no", [False, None, 0, "true", 1])
    def test_requests_that_ask_not_to_be_kept(self, no):
        request = asked(kv_transfer_params={requests.CACHE: no})
        assert requests.request_extra(request, requests.Adapters()) is None

    def test_and_no_others(self):
        for params in (None, {}, {"other": False}, {requests.CACHE: True}):
            assert (
                requests.request_extra(asked(kv_transfer_params=params), requests.Adapters()) == b""
            )
