"""Configuration files: what is refused before it costs anything, and what an error may quote."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {"yaml": (*PYTEST, "tests/unit/config/test_yaml_file.py")},
    mutants=(
        Mutant(
            "_Loader.construct_mapping",
            "key in lines",
            "False",
            "the last of two equal keys counts",
        ),
        Mutant(
            "_Loader.construct_mapping",
            "str(key_node.value if key_node.tag == _MERGE else "
            "self.construct_object(key_node, deep=True))",
            "key_node.tag + str(key_node.value)",
            "1 and '1' are two keys, of which one is lost",
        ),
        Mutant(
            "_Loader.construct_mapping",
            "f'line {line}: the key {key!r} stands in line {lines[key]} already; remove one "
            "of them'",
            "f'line {line}: the key {key!r} stands there already; remove one of them'",
            "nobody is told where the first of two keys stands",
        ),
        Mutant(
            "_Loader.compose_node",
            "self._depth == MOST_DEPTH",
            "False",
            "brackets cost hours",
        ),
        Mutant(
            "_Loader.compose_node",
            "self._depth -= 1",
            "self._depth -= 0",
            "a long file of few levels is refused",
        ),
        Mutant(
            "_Loader.compose_node",
            "self._nodes > MOST_NODES",
            "False",
            "aliases grow without a bound",
        ),
        Mutant(
            "_Loader.compose_node",
            "self._sizes[id(node)] if is_alias else 1",
            "1",
            "an alias counts as one value, whatever it stands for",
        ),
        Mutant(
            "_Loader.compose_node",
            "self._nodes - before",
            "1",
            "an alias counts as one value, whatever it stands for",
        ),
        Mutant(
            "_Loader.compose_node",
            "is_alias and id(node) not in self._sizes",
            "False",
            "an alias inside of what it stands for ends in a traceback",
        ),
        Mutant(
            "yaml_file._parsed",
            "len(text) > MOST_BYTES",
            "False",
            "a file of any size is parsed",
        ),
        Mutant(
            "yaml_file.read_yaml",
            "file.read(MOST_BYTES + 1)",
            "file.read()",
            "a file without an end fills the memory",
        ),
        Mutant(
            "yaml_file.read_yaml",
            "f'{name} is not YAML: {_told(error)}'",
            "f'{name} is not YAML: {error}'",
            "an error quotes the line with the password",
        ),
        Mutant(
            "yaml_file._without_quoting",
            "re.sub(\"'(?!<)[^']{2,}'\", \"'...'\", text)",
            "text",
            "an error quotes a part of the password",
        ),
    ),
)
