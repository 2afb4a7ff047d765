"""Shadows: find the order of leaving whose hits would save most compute, by trying all of them.
Pure.

Each shadow is the index of a place under one setting of
:class:`~kvtier.eviction.segments.Segments`, without any data. All shadows see the same prompts, and
the best setting is used for the live place. For a large place only a part of the sessions is
followed, with all turns of each, in shadows that are smaller by the same factor. Shadows never run
under the Store's lock. One thread at a time uses them (a lane's).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import AT_ONCE, Steps, pieces
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import LRU_SETTING, SETTINGS, Segments, Setting
from kvtier.eviction.sessions import SessionPrompt

_MOST_ROOM, _LEAST_ROOM = 12_288, 8
"""Chunks in a shadow. A larger place is followed in part."""
_REQUESTS = 200
"""Prompts between two comparisons of the settings."""
_EARLY_REQUESTS = (25, 50, 100, 150)
"""Prompts after which a setting may take over before the first comparison. A start is short, and a
bad setting costs most there."""
_LEAD, _FADES = 1.02, 0.8
"""A setting takes over when its score is higher by the first factor. At each comparison all scores
fade by the second factor, so that a change of load shows."""
_BEHIND, _PATIENCE, _PATIENCE_AT_FIRST = 0.95, 5, 5
"""A setting falls asleep after so many comparisons, and so many more at first, in each of which its
score was less than this part of the best."""
_SLEEPS, _WARMS_UP = 32, 3
"""Comparisons in which it sleeps, and in which its shadow fills before it is counted again."""
_CHANGED = 1.3
"""All settings wake when the best one saves so many times more of a chunk, or less, than it did."""


class Shadow(Segments):
    """The index of a place, which serves prompts as a Store would."""

    __slots__ = ("_departed", "_remembered")

    def __init__(self, room: int, setting: Setting) -> None:
        super().__init__(room, setting)
        self._remembered: dict[ChunkKey, int] = {}
        """Chunks that left, with the number of their departure. It is no OrderedDict, which takes
        milliseconds where it grows."""
        self._departed: deque[tuple[int, Sequence[ChunkKey]]] = deque()
        """They again, as they left together, the oldest first, with the last one's number."""

    def serving(self, run: Sequence[ChunkKey]) -> Steps[int]:
        """A prompt asks for ``run``, then all of it is stored. In pieces. Returns how many leading
        chunks were held.

        It has the same effect as ``used``, ``evicted`` and ``add`` of each chunk, and ``ordered``,
        without those calls.
        """
        once, again, new, held = self._once, self._again, list[ChunkKey](), len(run)
        for number, part in enumerate(_parts(run)):
            if number:
                yield 0.0
            absent = [key for key in part if key not in once and key not in again]
            if absent and not new:
                held = number * AT_ONCE + part.index(absent[0])
            new += absent
        had = run[:held]
        if has_holes := len(new) != len(run) - held:
            had = yield from self._held(run)
        is_mixed = has_holes | (yield from self._use(had))
        if new:
            yield from self._make_room(len(new), len(had))
            del new[max(0, self.room - len(once) - len(again)) :]
            is_mixed |= yield from self._store(new)
        if new or is_mixed:
            for part in reversed(_parts(run if is_mixed else had)):
                if is_mixed:
                    self.ordered(part)
                else:
                    _move(part, again if self._protected else once)
                if len(part) == AT_ONCE:
                    yield 0.0
        return held

    def _held(self, run: Sequence[ChunkKey]) -> Steps[list[ChunkKey]]:
        once, again, held = self._once, self._again, list[ChunkKey]()
        for part in _parts(run):
            held += [key for key in part if key in once or key in again]
            if len(part) == AT_ONCE:
                yield 0.0
        return held

    def _use(self, had: Sequence[ChunkKey]) -> Steps[bool]:
        """The prompt asks for these. True: some chunks were moved among them."""
        once, again, protected = self._once, self._again, self._protected
        for part in reversed(_parts(had)):
            if not protected:
                _move(part, once)
            else:
                for key in reversed(part):
                    if key in again:
                        again.move_to_end(key)
                    else:
                        again[key] = once.pop(key)
            if len(part) == AT_ONCE:
                yield 0.0
        surplus = max(0, len(again) - protected)
        for number in range(surplus):
            self._demote()
            if number % AT_ONCE == AT_ONCE - 1:
                yield 0.0
        return surplus > 0

    def _make_room(self, new: int, own: int) -> Steps[None]:
        """Make room for so many chunks, but never evict a chunk of the run itself. ``own``: so many
        it has, which were used just now. So they are the hottest ones: in the second list as many
        as it may have, and in the first one the others."""
        once, again = self._once, self._again
        wanted = len(once) + len(again) + new - self.room
        in_once = max(0, own - len(again)) if self._protected else own
        for order, hot in ((once, in_once), (again, own - in_once)):
            count = max(0, min(wanted, len(order) - hot))
            wanted -= count
            while count > 0:
                left = list(islice(order, min(count, AT_ONCE)))
                for key in left:
                    del order[key]
                self._gone(left)
                count -= len(left)
                if len(left) == AT_ONCE:
                    yield 0.0
            if wanted <= 0 or hot:
                break

    def _gone(self, left: Sequence[ChunkKey]) -> None:
        """These are remembered for a while."""
        if not self._known_for or not left:
            return
        remembered, departed, number = self._remembered, self._departed, self._left
        for key in left:
            number += 1
            remembered[key] = number
        self._left = number
        departed.append((number, left))
        oldest = number - self._known_for
        while departed[0][0] <= oldest:
            for key in departed.popleft()[1]:
                if remembered.get(key, number) <= oldest:
                    del remembered[key]

    def _store(self, new: Sequence[ChunkKey]) -> Steps[bool]:
        """Hold these. True: other chunks were moved among them."""
        once, again, ghosts, is_mixed = self._once, self._again, self._remembered, False
        known_for, left = self._known_for if self._protected else 0, self._left
        for part in reversed(_parts(new)):
            if len(part) == AT_ONCE:
                yield 0.0
            if ghosts.keys().isdisjoint(part):
                for key in reversed(part):
                    once[key] = 0
                continue
            for key in reversed(part):
                was = ghosts.pop(key, None)
                if was is not None and left - was < known_for:
                    again[key] = 0
                    if len(again) > self._protected:
                        is_mixed = True
                        self._demote()
                else:
                    once[key] = 0
        return is_mixed


def _move(run: Sequence[ChunkKey], order: OrderedDict[ChunkKey, int]) -> None:
    """All of them are in the order, and become its hottest."""
    for _ in map(order.move_to_end, reversed(run)):
        pass


def _parts(run: Sequence[ChunkKey]) -> Sequence[Sequence[ChunkKey]]:
    """``run`` in pieces."""
    return (run,) if len(run) <= AT_ONCE else list(pieces(run))


class _Contender:
    """One setting with its shadow."""

    __slots__ = (
        "behind",
        "counts_from",
        "hits",
        "order",
        "saved",
        "score",
        "setting",
        "wakes_at",
    )

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.order: Shadow | None = None
        """None while it sleeps."""
        self.hits = self.saved = self.score = 0.0
        """Chunks that it hit, and what those hits have saved, in the unit of
        :class:`SavedCompute`. While it is not counted, they grow as they did on average before. The
        score fades."""
        self.behind = 0
        """In so many comparisons without a break it was far behind the best."""
        self.wakes_at = self.counts_from = 0
        """The comparisons at which it is followed again, and from which on it is counted."""

    def count(self, hits: float, saved: float) -> None:
        self.hits += hits
        self.saved += saved


class Shadows:
    """The shadows of a place with room for ``room`` chunks. They begin with the first of
    ``settings``. ``compute``: what hits save, by which the settings are compared.

    A setting that is far behind sleeps: it is followed for a fifth of the time. All of them wake
    when the best one does much worse or better than before.
    """

    settings = SETTINGS

    def __init__(self, room: int, compute: SavedCompute) -> None:
        self._compute = compute
        self.now = 0
        """The index of the setting in use."""
        self.asked = 0
        """Chunks that the shadows were asked for."""
        self._contenders = [_Contender(each) for each in self.settings]
        self._requests = self._compared = self._asked_lately = 0
        self._rate = 0.0
        """What the best setting saved of each chunk when it was last looked at."""
        self.resize(room)

    def resize(self, room: int) -> None:
        """The live place has room for so many chunks from now on. The shadows start empty."""
        self.room = room
        self.part = part_of(room)
        for each in self._contenders:
            self._wake(each, self._compared)
            each.behind = -_PATIENCE_AT_FIRST

    def _wake(self, contender: _Contender, counts_from: int) -> None:
        """Follow it with an empty shadow."""
        contender.behind, contender.counts_from = 0, counts_from
        contender.order = Shadow(room_of(self.room, self.part), contender.setting)

    def seeing(self, prompt: SessionPrompt) -> Steps[None]:
        """A prompt came. In pieces. After the last one :attr:`now` says which setting to use."""
        passed = 0
        if self.part == 1 or spread(prompt.session) < self.part:
            for each in self._contenders:
                yield from self._serve(each, prompt.run)
                passed += len(prompt.run)
                if passed >= AT_ONCE:
                    passed = 0
                    yield 0.0
            self.asked += len(prompt.run)
            self._asked_lately += len(prompt.run)
        self._requests += 1
        if not self._requests % _REQUESTS:
            self._compare()
        elif self._requests in _EARLY_REQUESTS:
            self._choose()

    def _serve(self, contender: _Contender, run: Sequence[ChunkKey]) -> Steps[None]:
        order = contender.order
        hits = 0 if order is None else (yield from order.serving(run))
        if order is not None and self._compared >= contender.counts_from:
            saved = self._compute.of(hits)
            contender.score += saved
            contender.count(hits, saved)
        elif self.asked:
            part = len(run) / self.asked
            contender.count(part * contender.hits, part * contender.saved)

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """These chunks will not be asked for again. In pieces."""
        for order in [each.order for each in self._contenders if each.order is not None]:
            for part in pieces(run):
                order.cool(part)
                yield 0.0

    def hits(self) -> dict[str, int]:
        """How many of the :attr:`asked` chunks each setting hit, by its name. Those that came while
        it slept are estimated."""
        return {each.setting.name: int(each.hits) for each in self._contenders}

    def saved(self) -> dict[str, int]:
        """What these hits have saved, in chunks at a prompt's beginning."""
        return {each.setting.name: int(each.saved) for each in self._contenders}

    def _choose(self) -> float:
        """Use the best setting from now on if it is clearly better. Returns its score."""
        scores = [each.score for each in self._contenders]
        best = max(range(len(scores)), key=scores.__getitem__)
        if scores[best] > _LEAD * scores[self.now]:
            self.now = best
        return scores[best]

    def _compare(self) -> None:
        self._compared += 1
        best = self._choose()
        rate = best / max(1, self._asked_lately)
        self._asked_lately = int(_FADES * self._asked_lately)
        if not self._rate / _CHANGED < rate < self._rate * _CHANGED:
            for each in self._contenders:
                each.wakes_at = min(each.wakes_at, self._compared)
            self._rate = rate
        for each in self._contenders:
            self._rest(each, best)
            each.score *= _FADES

    def _rest(self, contender: _Contender, best: float) -> None:
        """A setting that is far behind falls asleep. It wakes with an empty shadow. A while later
        it counts again, as if it had been about as good as the best."""
        if contender.order is None:
            if self._compared >= contender.wakes_at:
                self._wake(contender, self._compared + _WARMS_UP)
            return
        if self._compared == contender.counts_from:
            contender.score = best / _LEAD
        if self._compared < contender.counts_from or contender.score >= _BEHIND * best:
            contender.behind = min(contender.behind, 0)
            return
        contender.behind += 1
        is_needed = contender.setting in (self.settings[self.now], LRU_SETTING)
        if contender.behind >= _PATIENCE and not is_needed:
            contender.order, contender.wakes_at = None, self._compared + _SLEEPS


def part_of(room: int) -> float:
    """The part of the sessions that is followed for a place with room for so many chunks."""
    return min(1.0, _MOST_ROOM / max(1, room))


def room_of(room: int, part: float) -> int:
    """The room of a shadow of this place."""
    return max(_LEAST_ROOM, int(room * part))


def spread(session: int) -> float:
    """A number from 0 to 1, evenly distributed and always the same for one session: a multiple of
    the golden ratio."""
    return session * 0.6180339887498949 % 1.0
