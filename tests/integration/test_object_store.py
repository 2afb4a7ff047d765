"""The object tier as README switches it on: `kvtier config`, `doctor` and `serve` in front of a
real S3 server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.checks.start import try_everything
from kvtier.config.keys import Config
from kvtier.tiers.objects.bucket import Bucket
from tests.s3_server import SECRET, S3Server, operated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def snippet() -> str:
    """README's own lines."""
    (block,) = re.findall(
        r"```bash\n(export KVTIER_OBJECT_URL=.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    return str(block)


def ran(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVTIER_", "AWS_"))
    }
    env = (
        kept
        | environment
        | {"PATH": path, "PYTHONPATH": str(ROOT), "KVTIER_RAM_BYTES": "64MiB", "COLUMNS": "400"}
    )
    return subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=240, check=False
    )


def doctor(script: str) -> str:
    return script.replace("kvtier doctor", f"{sys.executable} -m kvtier doctor --no-engine")


@pytest.mark.slow
def test_the_readmes_lines_switch_it_on_and_leave_nothing_behind(server: S3Server) -> None:
    done = ran(doctor(snippet()), server.environment)
    rows = [line for line in done.stdout.splitlines() if "object" in line]
    assert any(
        "s3://bucket/prefix: written, read, listed and deleted; 2 TiB are ours" in row
        for row in rows
    ), done
    assert any("self-test object" in row and "ok" in row for row in rows), done.stdout
    assert SECRET not in done.stdout + done.stderr
    with operated(server.environment):
        assert list(Bucket("s3://bucket", 1).listed("prefix")) == []


def test_the_doctor_says_what_is_wrong_with_it(server: S3Server) -> None:
    done = ran(doctor(snippet()).replace("s3://bucket/", "s3://nowhere/"), server.environment)
    assert done.returncode != 0
    assert "there is no such bucket; make it, or correct object_url" in done.stdout


def test_config_shows_it() -> None:
    script = f"{sys.executable} -m kvtier config --object-url s3://bucket/prefix"
    rows = [
        line.split() for line in ran(script, {}).stdout.splitlines() if line.startswith("object.")
    ]
    assert [row[:2] for row in rows] == [
        ["object.url", "s3://bucket/prefix"],
        ["object.bytes", "256"],
    ]


def test_a_server_that_can_never_use_it_does_not_start(server: S3Server, tmp_path: Path) -> None:
    script = f"{sys.executable} -m kvtier serve --listen unix://{tmp_path}/s.sock"
    given = {"KVTIER_OBJECT_URL": "s3://nowhere", "KVTIER_ADMIN": "off"}
    done = ran(script, server.environment | given)
    assert done.returncode != 0
    assert "there is no such bucket; make it, or correct object_url" in done.stderr


def test_a_bucket_that_is_only_away_is_trouble_and_no_error(server: S3Server) -> None:
    away = S3Server()
    settings = {"ram_bytes": 1 << 24, "object_url": "s3://bucket/prefix"}
    with operated(away.environment):
        (name, why), *others = try_everything(Config(**settings)).items()  # type: ignore[arg-type]
    assert (name, others) == ("object", [])
    assert (
        "s3://bucket/prefix cannot be reached: no connection; its chunks are misses until it can"
        in why
    )
    with operated(server.environment):
        assert try_everything(Config(**settings)) == {}  # type: ignore[arg-type]
