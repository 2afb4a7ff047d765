"""Hits that end within a block: for which engines, and what is kept and looked for."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.pool import Pool
from kvtier.store.store import Store
from tests.conftest import vllm_source, vllm_versions
from tests.unit.vllm_request import vllm_request

groups = pytest.importorskip("kvtier.connectors.vllm.groups")
prompts = pytest.importorskip("kvtier.connectors.vllm.scheduler_side.prompts")
partial_tails = pytest.importorskip("kvtier.connectors.vllm.scheduler_side.partial_tails")

pytestmark = pytest.mark.vllm
WITH_STATES = [
    version
    for version in sorted(vllm_versions())
    if tuple(int(part) for part in version.split(".")[:2]) >= (0, 32)
]
FINER = "supports_fine_grained_hash_lookup: ClassVar[bool]"
SLOT, BLOCK, UNIT = 4096, 784, 16
FULL = groups.Group(0, groups.Kind.FULL, BLOCK)
STATE = groups.Group(1, groups.Kind.STATE, BLOCK)
GEOMETRY = groups.Geometry((FULL, STATE), BLOCK)
LAYOUT = ChunkLayout(bytes(32), BLOCK, BLOCK, (SLOT,))
TOKENS = [*range(900)]
TABLES = [[3, 4], [0, 7]]
"""The running state is in block 7."""


def prompt(tokens=TOKENS):
    found = prompts.Prompt(vllm_request(tokens), LAYOUT.chain())
    found.chain.extend(tokens)
    return found


def tails(store=None, unit=UNIT):
    return partial_tails.PartialTails(store or Store(Pool(16, SLOT)), GEOMETRY, unit)


def kept(told, **more):
    """``(group, block number, blocks)`` of each piece that is kept of a tail."""
    one, tables = prompt(), more.pop("tables", TABLES)
    pieces, own = tails(**more).pieces(one, one.chain.keys, told, tables)
    return [
        (piece.group.number, piece.number, [own[piece.group.number][piece.number]])
        for piece in pieces.values()
    ]


def test_of_a_tail_the_block_of_attention_is_kept_and_the_copy_of_the_state():
    """The request's own block of states has gone on meanwhile: it is 7, and the copy is 9."""
    assert kept([(1, 9, 896)]) == [(0, 1, [4]), (1, 1, [9])]
    assert kept([(1, 8, 784), (1, 9, 896)]) == [(0, 1, [4]), (1, 1, [9])]
    assert kept([(1, 9, 896)], tables=[[3, 4], [0]]) == [(0, 1, [4]), (1, 1, [9])]


@pytest.mark.parametrize(
    ("told", "more"),
    [
        ([], {}),
        ([(1, 9, 784)], {}),
        ([(1, 9, 880), (1, 8, 896)], {}),
        ([(1, 9, 897)], {}),
        ([(1, 9, 912)], {}),
        ([(1, 9, 1696)], {}),
        ([(2, 9, 896)], {"tables": [[3, 4], [0, 7], [0, 9]]}),
        ([(1, 0, 896)], {}),
        ([(1, 9, 896)], {"tables": [[3], [0, 7]]}),
        ([(1, 9, 896)], {"tables": [[3, 0], [0, 7]]}),
        ([(1, 9, 896)], {"unit": 0}),
    ],
    ids=[
        "no states",
        "the end of a block",
        "two ends",
        "no multiple",
        "beyond the prompt",
        "far beyond it",
        "another group's",
        "the null block",
        "a short table",
        "no block of attention",
        "hits end with blocks",
    ],
)
def test_nothing_else_is_kept_as_a_tail(told, more):
    assert kept(told, **more) == []


class Asked:
    """A store that notes what it is asked: with a server each question is a message."""

    def __init__(self, store):
        self._store, self.questions = store, list[tuple[str, Any]]()

    def __getattr__(self, name):
        def ask(keys):
            self.questions.append((name, keys))
            return getattr(self._store, name)(keys)

        return ask


def test_a_prompts_ends_are_asked_of_once_and_in_one_message():
    store = Asked(Store(Pool(16, SLOT)))
    one, ours = prompt([*range(2 * BLOCK)]), tails(store, unit=2)
    for _ in range(3):
        assert ours.hit(one, one.chain.keys, BLOCK) is None
    ends = one.chain.within(1, one.request.all_token_ids, 2)[-2:-130:-1]
    assert store.questions == [("known", ends)], "the longest first, and not the whole prompt"


def unit(*, groups_=(FULL, STATE), size=BLOCK, drafts=None, told):
    config = SimpleNamespace(speculative_config=drafts)
    cache = SimpleNamespace(cache_hit_alignment_tokens=told)
    found: int = partial_tails.hit_unit(config, cache, groups.Geometry(groups_, size))
    return found


def test_an_engines_hits_end_within_blocks_where_that_is_proven():
    assert unit(told=UNIT) == UNIT
    assert unit(told=BLOCK) == unit(told=None) == unit(told=30) == 0
    assert unit(told=UNIT, drafts=object()) == 0, "their states are of another end"
    assert unit(told=UNIT, size=2 * BLOCK) == 0, "a chunk has several blocks"
    assert unit(told=UNIT, groups_=(FULL,)) == 0, "vLLM's hits end with blocks"
    window = groups.Group(2, groups.Kind.WINDOW, BLOCK, 512)
    assert unit(told=UNIT, groups_=(FULL, STATE, window)) == 0


@pytest.mark.parametrize("version", WITH_STATES)
def test_vllm_takes_hits_within_blocks_of_full_attention_and_states_alone(version):
    """Of a vLLM that can do more, more may be kept."""
    core = vllm_source(version) / "vllm/v1/core"
    source = (core / "single_type_kv_cache_manager.py").read_text(encoding="utf-8")
    finer = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(line) == f"{FINER} = True" for line in node.body)
    }
    assert finer == {"FullAttentionManager", "MambaManager"}
    scheduler = (core / "sched/scheduler.py").read_text(encoding="utf-8")
    assert "if partial_tail and ext_tokens > partial_tail:" in scheduler, "and of a connector"
