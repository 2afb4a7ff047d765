"""One word for one thing: the words that ``kvtier/GLOSSARY.md`` gives up do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("kvtier", "connectors", "autoconfig", "bench")
    for path in (ROOT / folder).rglob("*.py")
)
OWN_WORDS = {"GLOSSARY.md", "NOTES.md"}
"""The list of the words, and what was tried before there was one."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / page for page in ("README.md", ".github/SECURITY.md", "CONTRIBUTING.md")),
        *(
            page
            for folder in ("kvtier", "connectors", "bench", "deploy", "examples")
            for page in (ROOT / folder).rglob("*.md")
        ),
    ]
    if path.name not in OWN_WORDS
)
NOWHERE = {
    "forecast",
    "forecasts",
    "outlook",
    "realm",
    "realms",
    "plight",
    "plights",
    "parcel",
    "parcels",
    "dial",
    "dialer",
    "judge",
    "judged",
}
"""Neither in a name nor in a sentence."""
NOT_A_CALL = {"match", "reach", "extent", "look", "forget", "erase"}
"""No method of a store, a client, a tier or a server's session has such a name."""
ROOMS = tuple(
    f"kvtier/{room}" for room in ("admin/", "api", "client/", "server/", "store/", "tiers/")
)


def parts(name: str) -> set[str]:
    """``LoadPolicy_of`` -> load, policy, of."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def tokens(file: str) -> Iterator[tokenize.TokenInfo]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return tokenize.generate_tokens(io.StringIO(text).readline)


def said(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Za-z]+", text)}


@pytest.mark.parametrize("file", FILES)
def test_no_name_and_no_sentence_has_a_word_that_was_given_up(file: str) -> None:
    for token in tokens(file):
        if token.type == tokenize.NAME:
            found = parts(token.string) & NOWHERE
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            found = said(token.string) & NOWHERE
        else:
            continue
        assert not found, f"{file}:{token.start[0]}: {found}; see kvtier/GLOSSARY.md"


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(ROOMS)])
def test_lookups_and_removals_have_one_name(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    defined = set(re.findall(r"^    (?:async )?def (\w+)", text, re.MULTILINE))
    assert not defined & NOT_A_CALL, f"{file}; see kvtier/GLOSSARY.md"


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_the_words_of_the_glossary(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not said(text) & NOWHERE


def test_the_glossary_explains_the_words_that_are_used() -> None:
    glossary = (ROOT / "kvtier/GLOSSARY.md").read_text(encoding="utf-8")
    kept = glossary.partition("## Words that are not used")[0]
    for word in ("lookup", "invalidate", "purge", "spill", "promote", "lease", "estimate"):
        assert f"| {word} |" in kept or f"{word}," in kept
