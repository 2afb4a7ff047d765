"""One word for one thing: the words that ``kvtier/GLOSSARY.md`` gives up do not come back. And what
a program can hold of the rules of prose."""

import ast
import io
import re
import tokenize
from pathlib import Path

from tests.packaging.house_table import here

ROOT = Path(__file__).parents[2]
HOUSE = here()
OWN_WORDS = {"GLOSSARY.md", "NOTES.md"}
"""The list of the words, and what was tried before there was one."""
PAGES = [
    page
    for folder in ("kvtier", "connectors", "bench", "deploy", "examples", ".github")
    for page in (ROOT / folder).rglob("*.md")
    if page.name not in OWN_WORDS
]
NOWHERE = {"forecast", "forecasts", "outlook", "realm", "realms", "plight", "plights", "parcel",
           "parcels", "dial", "dialer", "judge", "judged"}  # fmt: skip
"""Neither in a name nor in a sentence."""
NOT_A_CALL = {"match", "reach", "extent", "look", "forget", "erase"}
"""No method of a store, a client, a tier or a server's session has such a name."""
ROOMS = tuple(
    f"kvtier/{room}" for room in ("admin/", "api", "client/", "server/", "store/", "tiers/")
)


def parts(name):
    """``LoadPolicy_of`` -> load, policy, of."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def said(text):
    return {word.lower() for word in re.findall(r"[A-Za-z]+", text)}


def test_no_name_and_no_sentence_has_a_word_that_was_given_up():
    for file in HOUSE.shipped:
        if not re.search("|".join(NOWHERE), HOUSE.text[file], re.IGNORECASE):
            continue
        for token in tokenize.generate_tokens(io.StringIO(HOUSE.text[file]).readline):
            words = parts(token.string) if token.type == tokenize.NAME else set()
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                words = said(token.string)
            assert not words & NOWHERE, f"{file}:{token.start[0]}; see kvtier/GLOSSARY.md"


def test_lookups_and_removals_have_one_name():
    for file in HOUSE.shipped:
        if file.startswith(ROOMS):
            found = re.findall(r"^    (?:async )?def (\w+)", HOUSE.text[file], re.MULTILINE)
            assert not NOT_A_CALL & set(found), f"{file}; see kvtier/GLOSSARY.md"


def test_pages_use_the_words_of_the_glossary():
    pages = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert [page for page in pages if said(page.read_text(encoding="utf-8")) & NOWHERE] == []


def test_the_glossary_explains_the_words_that_are_used():
    glossary = (ROOT / "kvtier/GLOSSARY.md").read_text(encoding="utf-8")
    kept = glossary.partition("## Words that are not used")[0]
    for word in ("lookup", "invalidate", "purge", "spill", "promote", "lease", "estimate"):
        assert f"| {word} |" in kept or f"{word}," in kept


BEGINS = re.compile(r"(It|What|Who|So many|These|Those|How many)\b|(``)?(True|None)(``)?:")
"""How no docstring of a module, a class, a function, a field or a constant begins."""


def docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for one in body if isinstance(body, list) else ():
            value = one.value if isinstance(one, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def test_a_docstring_begins_with_what_it_is_about():
    found = [
        f"{file}:{text.lineno}"
        for file in HOUSE.shipped
        for text in docstrings(HOUSE.tree(file))
        if BEGINS.match(str(text.value))
    ]
    assert found == []


# ---- units ---------------------------------------------------------------------------------------

UNITS = re.compile(r".*(S|[KMG]IB|PART|SHARE|FACTOR)")
"""How a quantity's name ends: a unit, what is counted, or a part or multiple of something."""
NO_QUANTITY = """
    COMMAND FIRST_BIT FIRST_FD FORMAT FORMAT_VERSION FULL LONG MORE MOST_NUMBER NIL NOWHERE NO_SIZE
    NULL_BLOCK OTHER_LENGTH PROMPT RAM_PLACE SEED SHARED TRIAL_OWNER UNLIMITED UNOWNED VERSION
    COLLAPSE FIXED MADV_POPULATE_READ MADV_REMOVE NO_RESERVE POPULATE_WRITE PR_SET_PDEATHSIG
    PUNCH_HOLE DEFAULT_PORT PORT SENTINEL_PORT SI_KERNEL CLOSED_PIPE INTERRUPTED OPERATOR_ERROR
    BATCHES_QUEUED BOUNCING FINDS_QUEUED LEAST_HELD MOST_LOADING MOST_SAVING
"""
"""Flags, places, formats, the kernel's numbers; those of the last line wait for a unit."""


def quantities(tree):
    for node in (one for one in tree.body if isinstance(one, ast.Assign)):
        target, value = node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if len(names) > 1 and isinstance(value, ast.Tuple) else [value]
        for name, one in zip(names, values, strict=False):
            inside = [part for part in ast.walk(one) if isinstance(part, ast.Constant | ast.Call)]
            number = isinstance(one, ast.BinOp | ast.Constant | ast.UnaryOp) and bool(inside)
            number = number and isinstance(name, ast.Name)
            if number and all(type(getattr(part, "value", "")) in (int, float) for part in inside):
                yield ast.unparse(name).lstrip("_")


def test_a_quantity_ends_in_its_unit():
    found = {(file, name) for file in HOUSE.product for name in quantities(HOUSE.tree(file))}
    assert ("kvtier/core/steps.py", "PIECE_CHUNKS") in found
    wrong = [one for one in found if not UNITS.fullmatch(one[1])]
    assert [one for one in wrong if one[1] not in NO_QUANTITY.split()] == []
