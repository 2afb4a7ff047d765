"""requirements/*.txt are complete: installed with --no-deps, they leave nothing to be found missing later."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
EXTRAS_OF_OURS = ("redis", "server", "bench", "dev")


def pinned() -> dict[str, str]:
    """Distribution -> version, of the pins that are for this platform."""
    pins: dict[str, str] = {}
    for file in (ROOT / "requirements").glob("*.txt"):
        for line in file.read_text().splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line)
                (pin,) = requirement.specifier
                assert pin.operator == "==", f"{file.name}: {line} is not pinned"
                if requirement.marker is None or requirement.marker.evaluate():
                    assert requirement.name not in pins, f"{line} is pinned twice"
                    pins[canonicalize_name(requirement.name)] = pin.version
    return pins


def needed(name: str) -> list[Requirement]:
    found = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return [
        requirement for requirement in found if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    ]


def test_every_pin_is_what_is_installed() -> None:
    assert {name: importlib.metadata.version(name) for name in pinned()} == pinned()


@pytest.mark.parametrize("name", sorted(pinned()))
def test_what_a_pin_needs_is_pinned_too(name: str) -> None:
    pins = pinned()
    missing = [str(need) for need in needed(name) if canonicalize_name(need.name) not in pins.keys() | LEFT_OUT]
    assert not missing


def test_what_kvtier_and_its_extras_need_is_pinned_and_new_enough() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS_OF_OURS:
        wanted += project["optional-dependencies"][extra]
    pins = pinned()
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)
