"""What a pattern stands for, and what becomes of the code around it."""

import ast

import pytest

from tests.trust.patterns import DoesNotFitError, planted, replaced

SOURCE = """
LIMIT = 4


class Box:
    def put(self, thing, *, twice=False):
        if thing in self.held and not twice:
            raise Full(
                thing,
            )
        self.held.append(thing)


def put(box, thing):
    box.put(thing)
    box.put(thing)
"""


def same(text, expected):
    return ast.unparse(ast.parse(text)) == ast.unparse(ast.parse(expected))


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "old", "new"),
    [
        ("", "LIMIT = 4", "LIMIT = 5", "LIMIT = 4", "LIMIT = 5"),
        ("Box.put", "raise Full(thing)", "raise Full(self)", "   thing,", "   self,"),
        ("Box.put", "self.held.append(thing)", "", "self.held.append(thing)", "pass"),
        ("Box.put", "thing in self.held", "False", "thing in self.held", "False"),
        ("put", "box.put(thing)\nbox.put(thing)", "box.put(thing)", "    box.put(thing)\n", ""),
        (
            "Box",
            "def put(self, thing, *, twice=False):\n    ...",
            "def put(self, thing, *, twice=True):\n    ...",
            "twice=False",
            "twice=True",
        ),
    ],
)
def test_a_pattern_stands_for_what_parses_alike(name, pattern, replacement, old, new):
    assert same(replaced(SOURCE, name, pattern, replacement), SOURCE.replace(old, new, 1))


def test_what_stood_for_any_statements_stands_there_again():
    source = "def go(a):\n    if a:\n        one()\n        two()\n    else:\n        three()\n"
    pattern = "if a:\n    ...\nelse:\n    ..."
    assert same(replaced(source, "go", pattern, "..."), "def go(a):\n    one()\n    two()")
    assert same(
        replaced(source, "go", pattern, "if not a:\n    ...\nelse:\n    ..."),
        source.replace("if a", "if not a"),
    )


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("put", "box.put(thing)"), ("Box.put", "self.held.pop()"), ("Box.take", "thing")],
)
def test_what_does_not_stand_there_once_does_not_fit(name, pattern):
    with pytest.raises(DoesNotFitError, match=r"stands [02] times"):
        replaced(SOURCE, name, pattern, "None")


def test_a_definition_is_called_by_as_much_as_makes_it_the_only_one(tmp_path):
    package, linked = tmp_path / "package", tmp_path / "elsewhere"
    for folder in (package / "room", linked):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("A = 1\n")
    (package / "room" / "box.py").write_text("def put(a):\n    return a + 1\n")
    (linked / "bag.py").write_text("def put(a):\n    return a + 1\n")
    (package / "outside").symlink_to(linked)
    assert planted(package, "bag.put", "a + 1", "a")[0] == "outside/bag.py"
    assert planted(package, "room.box.put", "a + 1", "a")[0] == "room/box.py"
    with pytest.raises(DoesNotFitError, match="2 definitions"):
        planted(package, "put", "a + 1", "a")
    with pytest.raises(DoesNotFitError, match="0 definitions"):
        planted(package, "chest.put", "a + 1", "a")
