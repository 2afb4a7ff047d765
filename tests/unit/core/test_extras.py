"""What is missing is installed by the packages' own names: no index has kvtier, so that a command
with that name in it would install whatever a stranger put there."""

import re
import tomllib
from pathlib import Path

import pytest

from kvtier.core.extras import EXTRAS, how
from kvtier.tiers.registry import TIERS

ROOT = Path(__file__).parents[3]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
OF_TIERS = [tier.name for tier in TIERS.values() if tier.section.modules]
WORDS = [
    ROOT / "README.md",
    *(
        path
        for folder in ("kvtier", "connectors", "autoconfig", "bench", "deploy", ".github")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".sh", ".yaml", ".yml"} or path.name.endswith("Dockerfile")
    ),
]
FREE_NAME = re.compile(r"pip install (?:-\S+ )*['\"]?kvtier(?![-\w./])|['\"`]kvtier\[[a-z,]+\]")


@pytest.mark.parametrize("extra", [*EXTRAS, *OF_TIERS])
def test_the_command_names_the_packages_that_pyproject_declares(extra):
    assert how(extra) == "pip install " + " ".join(map(repr, DECLARED[extra]))


def test_no_page_and_no_message_installs_a_name_that_is_free():
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in WORDS
        for line in path.read_text(encoding="utf-8").splitlines()
        if FREE_NAME.search(line) and "is not ours" not in line
    }
    assert not found
