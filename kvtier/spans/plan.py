"""What of a prompt can be put together from homes: which tokens, from where, how far they move.

A *section* is a run of a prompt's tokens that lie in one stored prompt: in the prompt itself, as
far as it is known, or in the home of one span. In a home the span begins where the anchor ends. So
its tokens move by ``distance`` places, which is none for the first span.

Sections follow each other without a hole, because an engine takes one run of tokens that it need
not compute. What lies behind the first hole is computed.

A *seam* is the first tokens of a span that is moved. A worker can compute them again in place, so
that they see what stands before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.spans.prompts import Range

PROMPT = 0
"""The source of a section that is the prompt's own beginning, and no span's."""
_MOST_RANGES = 1024


class Section(NamedTuple):
    """Tokens ``begin`` to ``end`` of a prompt: in their source, ``first`` and those behind it."""

    source: int
    """Index of the range whose home it is; :data:`PROMPT`: the prompt itself."""
    begin: int
    end: int
    first: int

    @property
    def distance(self) -> int:
        return self.begin - self.first


class Piece(NamedTuple):
    """Tokens of one slot, and where in the prompt they belong."""

    slot: int
    first: int
    """In the slot."""
    tokens: int
    begin: int
    """In the prompt."""
    distance: int


def ranges_of(given: object, tokens: int) -> list[Range]:
    """A request's ranges: the anchor's, then the spans'. ``tokens``: of its prompt.

    Raises ValueError, with what is wrong, unless they are pairs of whole numbers that ascend, do
    not overlap, begin at 0 and lie in the prompt.
    """
    if not isinstance(given, list) or not 2 <= len(given) <= _MOST_RANGES:
        raise ValueError(f"expected a list of 2 to {_MOST_RANGES} ranges, the anchor's first")
    found: list[Range] = []
    for pair in given:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"{pair!r}: expected [begin, end]")
        if not all(type(place) is int for place in pair):
            raise ValueError(f"{pair!r}: expected whole numbers")
        least = found[-1].end if found else 0
        begin, end = pair
        if not found and begin != 0:
            raise ValueError(f"{pair!r}: expected the anchor's range, which begins at 0")
        if not least <= begin < end <= tokens:
            raise ValueError(f"{pair!r}: expected begin and end between {least} and {tokens}")
        found.append(Range(begin, end))
    return found


def first_of(given: object) -> int:
    """How many tokens of each moved span a request wants computed in place. Raises ValueError, with
    what is wrong, for anything but a whole number."""
    if type(given) is not int or given < 0:
        raise ValueError(f"{given!r}: expected a whole number of tokens, at least 0")
    return given


def seams_of(ranges: Sequence[Range], first: int, begin: int, end: int) -> list[Range]:
    """The first ``first`` tokens of each span that is moved, as far as they lie between tokens
    ``begin`` and ``end`` of the prompt. A span next to the anchor stands as in its home."""
    anchor = ranges[0].end
    seams = [
        Range(max(span.begin, begin), min(span.begin + first, span.end, end))
        for span in ranges[1:]
        if span.begin != anchor
    ]
    return [seam for seam in seams if seam.begin < seam.end]


def sections_of(ranges: Sequence[Range], exact: int) -> list[Section]:
    """The longest run from the prompt's beginning on. ``exact``: tokens that are known of the
    prompt itself, which are taken as they are."""
    anchor, reach = ranges[0].end, exact
    found = [Section(PROMPT, 0, exact, 0)] if exact else []
    for source, span in enumerate(ranges[1:], 1):
        if span.end <= exact:
            continue
        begin = max(span.begin, exact)
        if source == 1 and span.begin == anchor:
            begin = exact  # its home has the anchor too
        if begin > reach:
            break
        found.append(Section(source, begin, span.end, begin - span.begin + anchor))
        reach = span.end
    return found


def is_moved(sections: Sequence[Section]) -> bool:
    """Whether any token is from another place, so that the prompt is no exact one."""
    return any(section.distance for section in sections)


def pieces_of(
    section: Section, slots: Sequence[int], chunk_tokens: int, begin: int, end: int
) -> Iterator[Piece]:
    """What of a section lies between tokens ``begin`` and ``end`` of the prompt, slot by slot.

    ``slots``: of the source's chunks, from the one in which the section begins.
    """
    at, until = max(begin, section.begin), min(end, section.end)
    zeroth = section.first // chunk_tokens
    while at < until:
        place = at - section.distance
        chunk, first = divmod(place, chunk_tokens)
        count = min(chunk_tokens - first, until - at)
        yield Piece(slots[chunk - zeroth], first, count, at, section.distance)
        at += count


def chunks_of(section: Section, chunk_tokens: int) -> range:
    """The chunks of its source that a section lies in."""
    last = section.first + section.end - section.begin - 1
    return range(section.first // chunk_tokens, last // chunk_tokens + 1)
