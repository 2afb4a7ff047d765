"""The parts of one load driven at random: whatever the order of arrivals, copies, failures and
cuts, what counts as loaded in the end was copied whole by every rank, and no claim is left."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.connectors.vllm.scheduler_side.parts import InParts, Part


class LoadInParts(RuleBasedStateMachine):
    """A store that reads, and ranks that copy. The model knows what each piece has gone through."""

    @initialize(pieces=st.integers(1, 12))
    def begin(self, pieces):
        self.parts = InParts(pieces)
        self.pieces = pieces
        self.reading: list[Part] = []
        self.copying: list[Part] = []
        self.read: set[int] = set()
        """Pieces that were verified in slots."""
        self.copied: set[int] = set()
        """Pieces that every rank has."""
        self.claimed: list[int] = []
        self.kept = self.most = 0
        self.is_cut = False
        self.end = pieces

    def _dropped(self, parts):
        for part in parts:
            self.reading.remove(part)  # raises for what was dropped before, or is being copied
        self.is_cut |= bool(parts)

    @rule(most=st.integers(1, 5))
    def claim(self, most):
        part = self.parts.claim(most)
        if part is None:
            assert len(self.claimed) >= self.parts.end
            return
        assert not self.is_cut
        assert part.size <= most
        self.claimed += range(part.begin, part.end)
        self.reading.append(part)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def arrive(self, data):
        part = self.parts.reading
        assert part is self.reading[0], "they are copied in order"
        ready = data.draw(st.integers(0, part.size) | st.just(part.size))
        self.is_cut |= ready < part.size
        self.reading.pop(0)
        self.read |= set(range(part.begin, part.begin + ready))
        self._dropped(self.parts.arrived(part, ready))
        if ready:
            self.copying.append(part)

    @precondition(lambda self: self.copying)
    @rule(data=st.data(), well=st.booleans())
    def copy(self, data, well):
        """Some rank may report a later part first, where that one failed at once."""
        part = data.draw(st.sampled_from(self.copying))
        self.copying.remove(part)
        pieces = set(range(part.begin, part.end))
        assert pieces <= self.read, "nothing is copied before it is verified"
        if well:
            self.copied |= pieces
        self.is_cut |= not well
        self._dropped(self.parts.copied(part, well=well))

    @rule()
    def cut(self):
        self._dropped(self.parts.cut())
        self.is_cut = True
        assert not self.reading

    @invariant()
    def what_counts_was_copied(self):
        parts = self.parts
        assert set(range(parts.kept)) <= self.copied, "nothing counts before all ranks have it"
        assert self.kept <= parts.kept <= parts.end <= self.end <= self.pieces, "only shorter"
        assert self.claimed == list(range(len(self.claimed))), "without a gap, none twice"
        self.kept, self.end = parts.kept, parts.end
        if self.is_cut:
            assert not self.reading, "nothing more is read"
        if parts.is_over:
            assert not self.copying and not self.reading, "no rank reads a slot any more"
            assert parts.kept == parts.end

    def teardown(self):
        """Whatever happened, it comes to an end."""
        if not hasattr(self, "parts"):
            return
        self.cut()
        for part in self.copying:
            self.parts.copied(part, well=True)
        assert self.parts.is_over


TestLoadInParts = LoadInParts.TestCase
TestLoadInParts.settings = settings(max_examples=200, stateful_step_count=30)
