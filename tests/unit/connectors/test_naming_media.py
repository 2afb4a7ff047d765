"""Media are named by what the model gets of them, and not by what vLLM or a client calls them."""

import gc
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

from kvtier.connectors.vllm.naming.media import MediaNames, digest_of


def item(called, data):
    return SimpleNamespace(identifier=called, data=data)


def processed(value, **more):
    """As vLLM has it: fields of an item, each with a tensor or several."""
    elements = {"pixels": torch.full((3, 4), value), "grid": [torch.ones(2), torch.zeros(3)]}
    fields = (elements | more).items()
    return UserDict({name: SimpleNamespace(field="batched", data=data) for name, data in fields})


def test_a_counter_of_a_process_is_no_name():
    one, other = (MediaNames().name(item("renderer0-mm-1-image-0", processed(x))) for x in (1, 2))
    assert one != other


def test_the_same_content_has_the_same_name_in_every_start():
    names = [MediaNames().name(item(f"mm-{at}", processed(1))) for at in range(2)]
    assert names[0] == names[1] is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"pixels": torch.full((4, 3), 1.0)},
        {"pixels": torch.full((3, 4), 1.0).double()},
        {"pixels": torch.cat([torch.ones(11), torch.tensor([1.0000001])]).reshape(3, 4)},
        {"grid": [torch.ones(2), torch.zeros(4)]},
        {"grid": [torch.ones(2)]},
        {"another": torch.ones(1)},
    ],
    ids=["shape", "type", "last bit", "second tensor", "fewer", "another field"],
)
def test_everything_of_it_counts(changed):
    assert digest_of(processed(1, **changed)) != digest_of(processed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_every_type_of_element_is_read(dtype):
    ones, zeros = torch.ones(2, 3).to(dtype), torch.zeros(2, 3).to(dtype)
    assert digest_of({"x": ones}) == digest_of({"x": ones.clone()}) != digest_of({"x": zeros})
    assert digest_of({"x": ones[:, :2]}) == digest_of({"x": ones[:, :2].contiguous()}) != ""


@pytest.mark.parametrize(
    "data",
    [None, {"address": 7}, {"a": SimpleNamespace(field="x", data=None)},
     {"a": torch.ones(1, device="meta")}, {"a": object()}],
    ids=["none", "a place in shared memory", "no tensor", "on another device", "unknown"],
)  # fmt: skip
def test_what_cannot_be_read_is_this_start_s_own(data):
    names = MediaNames()
    feature = item("scan-1.png", data)
    first = names.name(feature)
    assert first == names.name(feature) is not None
    assert first != MediaNames().name(feature)
    assert not names.last([feature])


class TestOneNameWithTwoContents:
    """vLLM's cache of encoded media goes by its name, and may give the first one's for both."""

    def test_is_not_cached_any_more(self):
        names = MediaNames()
        one, two = item("scan-1.png", processed(1)), item("scan-1.png", processed(2))
        assert names.name(one) is not None
        assert names.name(two) is None
        assert names.name(one) is None, "the second one's may be there now"
        assert not names.last([one])

    def test_also_where_the_first_object_is_gone(self):
        names = MediaNames()
        names.name(item("scan-1.png", processed(1)))
        gc.collect()
        assert names.name(item("scan-1.png", processed(1))) is not None
        assert names.name(item("scan-1.png", processed(2))) is None

    def test_and_what_could_not_be_read_once_counts_as_another(self):
        names = MediaNames()
        names.name(item("scan-1.png", None))
        assert names.name(item("scan-1.png", processed(1))) is None


def test_an_object_is_read_once(monkeypatch):
    names, feature = MediaNames(), item("cat", processed(1))
    first = names.name(feature)
    monkeypatch.setattr("kvtier.connectors.vllm.naming.media.digest_of", None)
    assert names.name(feature) == first


def test_names_are_forgotten_oldest_first(monkeypatch):
    monkeypatch.setattr("kvtier.connectors.vllm.naming.media._MOST_NAMES", 2)
    names = MediaNames()
    for called in ("a", "b", "a", "c"):
        names.name(item(called, processed(1)))
    assert list(names._known) == ["a", "c"]


@pytest.mark.vllm
def test_vllm_s_own_items_are_read():
    from vllm.multimodal.inputs import MultiModalKwargsItem

    read = digest_of(MultiModalKwargsItem.dummy(nbytes=8))
    assert read
    assert read != digest_of(MultiModalKwargsItem.dummy(nbytes=9))
