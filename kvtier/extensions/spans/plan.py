"""Parts of a prompt that can be put together from homes: which tokens, from where, how far they
move.

A *section* is a run of a prompt's tokens that lie in one stored prompt: in the prompt itself, as
far as it is known, or in the home of one span. In a home the span begins where the anchor ends. So
its tokens move by ``distance`` places, which is none for the first span.

An engine takes one run of tokens that it need not compute. So what lies in a *hole* between two
sections has to be computed in place, which a worker does as one :class:`InPlaceRun` a hole. It
does the same with a *seam*, the first tokens of a span that is moved, so that they see what stands
before them. Only so many tokens are computed in place. Sections end before the run that would be
too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.connectors.vllm.groups import InPlaceRun, SpanMove
from kvtier.spans import Range

PROMPT = 0
"""Source of a section that is the prompt's own beginning, and no span's."""
MOST_SPANS = 64
"""Most documents of one request. Each is a lookup and a load in the engine's scheduling loop."""


class Section(NamedTuple):
    """Tokens ``begin`` to ``end`` of a prompt, which begin at token ``first`` of their source."""

    source: int
    """Number of the range whose home it is, or :data:`PROMPT`."""
    begin: int
    end: int
    first: int

    @property
    def distance(self) -> int:
        return self.begin - self.first


class TooManyError(ValueError):
    pass


def ranges_of(given: object, tokens: int) -> list[Range]:
    """Parse the ranges: the anchor's, then the spans'. ``tokens``: of the prompt. Raises
    TooManyError, or ValueError with the fault."""
    expected = f"expected a list of 2 to {1 + MOST_SPANS} ranges, the anchor's first"
    if not isinstance(given, list) or len(given) < 2:
        raise ValueError(expected)
    if len(given) > 1 + MOST_SPANS:
        raise TooManyError(f"{len(given):,} ranges: {expected}")
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
    """Parse the number of tokens of each moved span to be computed in place. Raises ValueError."""
    if type(given) is not int or given < 0:
        raise ValueError(f"{given!r}: expected a whole number of tokens, at least 0")
    return given


def sections_of(ranges: Sequence[Range], exact: int, homes: Sequence[int]) -> list[Section]:
    """Put the prompt together from its own first ``exact`` tokens and from homes. ``homes``: the
    known tokens of each range's home, after the anchor's."""
    anchor = ranges[0].end
    found = [Section(PROMPT, 0, exact, 0)] if exact else []
    whole = next((source for source, known in enumerate(homes, 1) if known >= anchor), PROMPT)
    if exact < anchor and whole:  # each home begins with the anchor
        found.append(Section(whole, exact, anchor, exact))
    for source, (span, known) in enumerate(zip(ranges[1:], homes, strict=True), 1):
        begin, end = max(span.begin, exact), min(span.end, span.begin + known - anchor)
        if begin >= end:
            continue
        section = Section(source, begin, end, begin - span.begin + anchor)
        last = found[-1] if found else section
        if (last.source, last.end, last.distance) == (source, begin, section.distance):
            found[-1] = last._replace(end=end)
        else:
            found.append(section)
    return found


def runs_of(
    ranges: Sequence[Range], sections: Sequence[Section], first: int, begin: int
) -> list[InPlaceRun]:
    """Return the holes behind the first ``begin`` tokens, and the first ``first`` tokens of each
    span that is moved, in ascending order."""
    runs, reach = list[InPlaceRun](), begin
    for section in sections:
        if section.end <= begin:
            continue
        at = max(section.begin, begin)
        seam = 1 if at > reach else 0
        if section.distance:
            seam = max(seam, min(ranges[section.source].begin + first, section.end) - at)
        if seam:
            runs.append(InPlaceRun(reach, at, at + seam))
        reach = section.end
    return runs


def bounded(
    ranges: Sequence[Range], sections: Sequence[Section], first: int, begin: int, most: int
) -> list[Section]:
    """Return the sections up to the run that would exceed ``most`` tokens computed in place."""
    tokens = 0
    for run in runs_of(ranges, sections, first, begin):
        tokens += run.end - run.begin
        if tokens > most:
            return [section for section in sections if section.end <= run.moved]
    return list(sections)


def in_blocks(sections: Sequence[Section], longest: int, block: int) -> list[Section]:
    """Cut the sections at ``longest`` tokens or earlier, at the end of a whole block that they
    cover."""
    found, end = list(sections), longest
    while found:
        end = min(end, found[-1].end) // block * block
        found = [section for section in found if section.begin < end]
        if found and found[-1].end >= end:
            return [*found[:-1], found[-1]._replace(end=end)]
    return []


def is_moved(sections: Sequence[Section]) -> bool:
    return any(section.distance for section in sections)


def pieces_of(
    section: Section, slots: Sequence[int], chunk_tokens: int, begin: int, end: int
) -> Iterator[SpanMove]:
    """Yield the moves of a section's tokens from ``begin`` to ``end``, slot by slot. ``slots``: of
    the source's chunks, from the one in which the section begins."""
    at, until = max(begin, section.begin), min(end, section.end)
    zeroth = section.first // chunk_tokens
    while at < until:
        place = at - section.distance
        chunk, first = divmod(place, chunk_tokens)
        count = min(chunk_tokens - first, until - at)
        yield SpanMove(slots[chunk - zeroth], first, count, at, section.distance)
        at += count


def chunks_of(section: Section, chunk_tokens: int) -> range:
    last = section.first + section.end - section.begin - 1
    return range(section.first // chunk_tokens, last // chunk_tokens + 1)
