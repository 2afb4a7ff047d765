"""Configuration files: what is refused before it costs anything, and what an error may quote."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_FILE = "config/yaml_file.py"

ROOM = Room(
    {"yaml": (*PYTEST, "tests/unit/config/test_yaml_file.py")},
    mutants=(
        Mutant(
            _FILE,
            "            if key in lines:",
            "            if False:",
            ("the last of two equal keys counts"),
        ),
        Mutant(
            _FILE,
            (
                "            key = str(\n"
                "                key_node.value\n"
                "                if key_node.tag == _MERGE\n"
                "                else self.construct_object(key_node, deep=True)\n"
                "            )\n"
            ),
            "            key = key_node.tag + str(key_node.value)\n",
            "1 and '1' are two keys, of which one is lost",
        ),
        Mutant(
            _FILE,
            "{key!r} stands in line {lines[key]} already",
            "{key!r} stands there already",
            "nobody is told where the first of two keys stands",
        ),
        Mutant(
            _FILE,
            ("        if self._depth == MOST_DEPTH:"),
            "        if False:",
            "brackets cost hours",
        ),
        Mutant(
            _FILE,
            "        self._depth -= 1",
            "        self._depth -= 0",
            ("a long file of few levels is refused"),
        ),
        Mutant(
            _FILE,
            ("        if self._nodes > MOST_NODES:"),
            "        if False:",
            "aliases grow without a bound",
        ),
        Mutant(
            _FILE,
            "self._sizes[id(node)] if is_alias else 1",
            "1",
            "an alias counts as one value, whatever it stands for",
        ),
        Mutant(
            _FILE,
            ("self._sizes.setdefault(id(node), self._nodes - before)"),
            "self._sizes.setdefault(id(node), 1)",
            "an alias counts as one value, whatever it stands for",
        ),
        Mutant(
            _FILE,
            "        if is_alias and id(node) not in self._sizes:",
            "        if False:",
            "an alias inside of what it stands for ends in a traceback",
        ),
        Mutant(
            _FILE,
            ("    if len(text) > MOST_BYTES:"),
            "    if False:",
            "a file of any size is parsed",
        ),
        Mutant(
            _FILE,
            "_parsed(file.read(MOST_BYTES + 1))",
            "_parsed(file.read())",
            "a file without an end fills the memory",
        ),
        Mutant(
            _FILE,
            '        raise ConfigError(f"{name} is not YAML: {_told(error)}") from None',
            '        raise ConfigError(f"{name} is not YAML: {error}") from None',
            "an error quotes the line with the password",
        ),
        Mutant(
            _FILE,
            "    return re.sub(r\"'(?!<)[^']{2,}'\", \"'...'\", text)",
            "    return text",
            "an error quotes a part of the password",
        ),
    ),
)
