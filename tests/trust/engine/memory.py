"""The fake model: what every position's KV must be, and the memory of one worker rank that holds
it.

The KV of a position is a 64-bit hash of everything before it (tokens, salt), mixed with the layer
and the rank. So a block that holds anything but the KV of its own prefix is seen at once, whatever
put it there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.trust.engine.cells import BLOCK, VOCABULARY

Array = np.ndarray[Any, Any]
_GARBAGE = np.uint64(0x6261643F6B763F21)


def chain(salt, tokens, known=None):
    """For each position the hash of ``salt`` and of all tokens up to it. ``known``: the hashes of
    leading positions."""
    found = list(known or ())
    state = (
        found[-1]
        if found
        else int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")
    )
    for token in tokens[len(found) :]:
        state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state ^= state >> 29
        found.append(state)
    return found


def next_token(state):
    """What the fake model answers after the position whose hash this is."""
    return (state >> 17) % VOCABULARY


@dataclass(frozen=True)
class Need:
    """What a cache group needs of the positions before one: ``full``, ``window`` and ``local`` with
    their reach, or a ``state``, which a block holds for all positions up to its last. ``whole`` is
    a draft's full attention, of which ranks divide no block. ``latent`` is a window of MLA,
    ``replayed`` one of which vLLM caches nothing: it computes the window behind a hit again. A
    ``ring`` is a window of one block, of which vLLM caches nothing either, and hits end where it is
    empty."""

    kind: str
    reach: int = 0
    block_tokens: int = BLOCK

    @classmethod
    def parse(cls, text):
        """``"window 40"``, or ``"latent 9/4"`` for a window of 9 in blocks of 4 tokens."""
        kind, _, numbers = text.partition(" ")
        reach, _, block = numbers.partition("/")
        return cls(kind, int(reach or 0), int(block or BLOCK))

    def first(self, end):
        """The first position that the position ``end`` reads."""
        if self.kind in ("window", "latent", "replayed"):
            return max(0, end - self.reach + 1)
        if self.kind == "ring":
            return end // self.reach * self.reach
        return end // self.reach * self.reach if self.kind == "local" else 0


@dataclass(frozen=True)
class Share:
    """What one of ``of`` ranks has of each block that they divide: ``turn`` tokens, as many for
    each of the others, and so on. As in vLLM's block tables."""

    rank: int = 0
    of: int = 1
    turn: int = 1

    def own(self, positions):
        """Those of the positions that this rank has."""
        found: Array = positions[positions // self.turn % self.of == self.rank]
        return found

    def within(self, positions):
        """Their places in what this rank has of everything."""
        found: Array = positions // (self.turn * self.of) * self.turn + positions % self.turn
        return found


class Words:
    """A layer whose positions are a few words each, in blocks of ``BLOCK`` positions. ``first``: a
    number of its own."""

    COUNT = 2

    def __init__(self, memory, first):
        self._memory = memory
        self._flat = memory.numpy().view(np.uint64).reshape(len(memory) * BLOCK, self.COUNT)
        numbers = [first + word for word in range(self.COUNT)]
        self._mark = np.array(numbers, np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def differs(self, blocks, places, states):
        held = self._flat.take(blocks * BLOCK + places, axis=0)
        first, second = (held ^ self._mark).T
        wrong: Array = (first != states) | (second != states)
        return wrong

    def put(self, blocks, places, states, garbage):
        self._flat[blocks * BLOCK + places] = states[:, None] ^ self._mark ^ garbage

    def has_state(self, block, state):
        place, wanted = block * BLOCK, np.uint64(state) ^ self._mark
        return bool(self._flat[place, 0] == wanted[0] and (self._flat[place + 1] == wanted).all())

    def put_state(self, block, state, garbage):
        place, value = block * BLOCK, np.uint64(state) ^ self._mark ^ garbage
        self._flat[place, 0] = value[0]
        self._flat[place + 1] = value

    def move_state(self, source, target):
        place, other = source * BLOCK, target * BLOCK
        self._flat[other : other + 2] = self._flat[place : place + 2]

    def copy(self, source, target):
        self._memory[target] = self._memory[source]

    def scribble(self, blocks):
        self._memory[list(blocks)] = 0x0BAD


class RankMemory:
    """The paged KV cache of one rank: of each group what it needs and its layers. ``tensors``: what
    is registered, by layer."""

    def __init__(self, groups, tensors, share=Share()):
        self._groups, self._share, self.left_to_others = groups, share, 0
        self._window = max((one.reach for one, _ in groups if one.kind == "replayed"), default=0)
        self.tensors = tensors

    @classmethod
    def of_words(cls, groups, rank, blocks, share=Share()):
        """For each layer of a group a tensor ``[blocks, tokens a block, words]`` of int64. As in
        vLLM the groups lie over one another: their layers of equal number share a tensor, and every
        block belongs to one group at a time. A state is two tensors, which lie in the first tokens'
        places of a block. Blocks of fewer tokens are padded. ``rank``: a number for its KV, which
        ranks with the same KV have in common."""
        most = max(len(names) for _, names in groups)
        memory = [torch.zeros(blocks, BLOCK, Words.COUNT, dtype=torch.int64) for _ in range(most)]
        layers = [
            [
                Words(memory[n], rank * 1_000_003 + place * 104_729 + n * 7919 + 1)
                for n in range(len(names))
            ]
            for place, (_, names) in enumerate(groups)
        ]
        tensors = {
            name: [tensor[:, 0, :1], tensor[:, 1]]
            if need.kind == "state"
            else tensor[:, : need.block_tokens]
            for need, names in groups
            for name, tensor in zip(names, memory, strict=True)
        }
        needs = [need for need, _ in groups]
        return cls(list(zip(needs, layers, strict=True)), tensors, share)

    def _places(self, need, blocks, begin, end):
        """The positions that this rank has of a stretch, and the block and the place in it of
        each."""
        positions, size = np.arange(begin, end), need.block_tokens
        table: Array = np.asarray(blocks, np.int64)
        local = positions
        if need.kind == "full" and self._share.of > 1:
            positions = self._share.own(positions)
            local = self._share.within(positions)
            self.left_to_others += end - begin - len(positions)
        if need.kind == "ring":
            return positions, np.full(len(positions), table[0]), local % size
        return positions, table[local // size], local % size

    def wrong(self, blocks, states, computed, replay=0, column=None):
        """What is not what it must be of all that a step from position ``computed`` on reads, else
        "". ``blocks``: by group. ``states``: of :func:`chain`, as uint64. ``replay``: where a
        replay began, else 0. ``column``: where in a table the running state lies, if not at the end
        of what is computed."""
        for (need, layers), table in zip(self._groups, blocks, strict=True):
            end = self._known(need, computed, replay, len(states))
            begin = need.first(end)
            if need.kind == "replayed":
                begin = max(begin, replay)
            if need.kind == "ring" and replay:
                begin = max(begin, replay + self._window)
            if begin >= end:
                continue
            if need.kind == "state":
                block = table[(end - 1) // need.block_tokens if column is None else column]
                if not all(layer.has_state(block, states[end - 1]) for layer in layers):
                    return f"the state after position {end - 1}"
                continue
            positions, held, places = self._places(need, table, begin, end)
            wanted = states[positions]
            bad = np.zeros(len(positions), bool)
            for layer in layers:
                bad |= layer.differs(held, places, wanted)
            if bad.any():
                return f"position {positions[bad.argmax()]} of a {need.kind} group"
        return ""

    def _known(self, need, computed, replay, end):
        """Up to where a group has KV before a step. A replay writes replayed windows alone: of the
        others the whole hit is there, and stays."""
        if replay and need.kind != "replayed":
            return min(max(computed, replay + self._window), end)
        return computed

    def write(self, blocks, states, computed, replay=0, column=None, drafts=0, *, sound):
        """The forward pass writes the positions from ``computed`` on; garbage if it computed over
        garbage. The state before the last ``drafts`` of them goes to a ``column`` of the table, and
        that after each draft to the next one."""
        garbage = np.uint64(0) if sound else _GARBAGE
        for (need, layers), table in zip(self._groups, blocks, strict=True):
            begin = self._known(need, computed, replay, len(states))
            if begin == len(states):
                continue
            if need.kind == "state":
                last = (len(states) - 1) // need.block_tokens if column is None else column
                for beyond, state in enumerate(states[len(states) - 1 - drafts :]):
                    for layer in layers:
                        layer.put_state(table[last + beyond], state, garbage)
                continue
            first = max(begin, len(states) - need.block_tokens) if need.kind == "ring" else begin
            positions, held, places = self._places(need, table, first, len(states))
            new = states[positions]
            for layer in layers:
                layer.put(held, places, new, garbage)

    def move_state(self, blocks, source, target):
        """After sampling the state in one column of a table is copied to another."""
        for (need, layers), table in zip(self._groups, blocks, strict=True):
            if need.kind == "state":
                for layer in layers:
                    layer.move_state(table[source], table[target])

    def put_state(self, group, block, state, *, sound):
        """A forward pass writes one more state of a group."""
        for layer in self._groups[group][1]:
            layer.put_state(block, state, np.uint64(0) if sound else _GARBAGE)

    def copy(self, source, target):
        """One block is copied to another, as vLLM has it done before a forward pass."""
        for _, layers in self._groups:
            for layer in layers:
                layer.copy(source, target)

    def scribble(self, blocks):
        """A load failed half way: what is in these blocks now is nobody's KV."""
        for _, layers in self._groups:
            for layer in layers:
                layer.scribble(blocks)
