"""Small defects, planted by what the code says and not by how it is laid out: a pattern is Python,
and stands for every piece of a definition that parses to the same tree.

A pattern is an expression, or statements that follow one another. ``...`` as a statement stands for
any statements, and in the replacement for the same ones again, in the order in which they were met.
Names of definitions are dotted: ``Class.method``, ``module.function``, ``module``, with as much in
front as makes them the only one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from typing import NamedTuple

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NOT_MEANT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields that say nothing about what a piece of code does."""


class DoesNotFitError(Exception):
    """A pattern that stands nowhere, or more than once."""


class _Place(NamedTuple):
    """Where a pattern was met."""

    above: ast.AST
    name: str
    """The field of ``above``."""
    begin: int | None
    """The first one, where the field is a list."""
    length: int
    met: list[list[ast.stmt]]
    """What stood for each ``...``."""


def parsed(pattern, replacement):
    """Both as expressions, or both as statements.

    Raises:
        SyntaxError: they are not Python.
    """
    try:
        return ast.parse(pattern, mode="eval").body, ast.parse(replacement, mode="eval").body
    except SyntaxError:
        return ast.parse(pattern).body, ast.parse(replacement).body


def is_any(statement):
    """Whether it is ``...``."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is ...
    )


def _same(wanted, given, met):
    """Whether one piece of code is what a pattern's piece says."""
    if isinstance(wanted, list):
        if not isinstance(given, list):
            return False
        if len(wanted) == 1 and is_any(wanted[0]):
            met.append(given)
            return True
        return len(wanted) == len(given) and all(
            _same(one, other, met) for one, other in zip(wanted, given, strict=True)
        )
    if isinstance(wanted, ast.AST):
        return type(wanted) is type(given) and all(
            _same(getattr(wanted, name, None), getattr(given, name, None), met)
            for name in wanted._fields
            if name not in _NOT_MEANT
        )
    return type(wanted) is type(given) and wanted == given


def _places(root, wanted):
    """All of them below ``root``."""
    for above in ast.walk(root):
        for name, value in ast.iter_fields(above):
            if isinstance(wanted, ast.expr):
                many = isinstance(value, list)
                for number, one in enumerate(value if many else [value]):
                    if isinstance(one, ast.expr) and _same(wanted, one, []):
                        yield _Place(above, name, number if many else None, 1, [])
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for begin in range(len(value) - len(wanted) + 1):
                    met: list[list[ast.stmt]] = []
                    slices = value[begin : begin + len(wanted)]
                    if all(_same(*pair, met) for pair in zip(wanted, slices, strict=True)):
                        yield _Place(above, name, begin, len(wanted), met)


class _Filled(ast.NodeTransformer):
    """``...`` becomes what it stood for."""

    def __init__(self, met):
        self._met = iter(met)

    def visit_Expr(self, node):
        return next(self._met, []) if is_any(node) else node


def _replace(place, replacement):
    into = getattr(place.above, place.name)
    if place.begin is None:
        setattr(place.above, place.name, replacement)
    elif isinstance(replacement, ast.expr):
        into[place.begin] = replacement
    else:
        module = _Filled(place.met).visit(ast.Module(replacement, []))
        into[place.begin : place.begin + place.length] = module.body or [ast.Pass()]


def _named(tree, name):
    """The definitions with this name in a module. The module's own is empty."""
    found: list[Definition] = [tree]
    for part in filter(None, name.split(".")):
        found = [
            each
            for one in found
            for each in _defined_in(one)
            if not isinstance(each, ast.Module) and each.name == part
        ]
    return found


def _defined_in(definition):
    """The definitions right inside, below conditions as well."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(definition))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.stmt | ast.excepthandler):
            waiting.extend(ast.iter_child_nodes(node))


def _all_named(definition, prefix):
    yield prefix
    for each in _defined_in(definition):
        assert not isinstance(each, ast.Module)
        yield from _all_named(each, f"{prefix}.{each.name}")


@cache
def definitions(package):
    """Each name that a definition of this package may be called by -> what it may mean: a file,
    relative to the package, and the definition's name in it."""
    found: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in package.rglob("*.py"):  # links into the package are followed below
        _add(found, package, path)
    for link in (each for each in package.iterdir() if each.is_symlink() and each.is_dir()):
        for path in (link / "").rglob("*.py"):
            _add(found, package, path)
    return dict(found)


def _add(found, package, path):
    file = path.relative_to(package)
    if "__pycache__" in file.parts:
        return
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    for name in _all_named(ast.parse(path.read_text(encoding="utf-8")), module):
        own = name[len(module) + 1 :]
        parts = name.split(".")
        for first in range(len(parts)):
            found[".".join(parts[first:])].add((str(file), own))


def planted(package, where, pattern, replacement):
    """The file that has the definition ``where``, relative to ``package``, and its text with the
    replacement in the place of the pattern, as Python lays it out.

    Raises:
        DoesNotFitError: there is not exactly one such definition, or the pattern does not stand in
            it exactly once.
    """
    meant = definitions(package).get(where, set())
    if len(meant) != 1:
        raise DoesNotFitError(f"{where!r} are {len(meant)} definitions: {sorted(meant)}")
    [(file, name)] = meant
    text = (package / file).read_text(encoding="utf-8")
    return file, replaced(text, name, pattern, replacement)


def replaced(text, name, pattern, replacement):
    """See :func:`planted`. ``name``: of the definition in this module; empty for all of it."""
    tree = ast.parse(text)
    wanted, becomes = parsed(pattern, replacement)
    places = [place for each in _named(tree, name) for place in _places(each, wanted)]
    places = list({(id(one.above), one.name, one.begin): one for one in places}.values())
    if len(places) != 1:
        raise DoesNotFitError(f"{pattern!r} stands {len(places)} times in {name or 'the module'}")
    _replace(places[0], becomes)
    return ast.unparse(ast.fix_missing_locations(tree))
