"""What an engine has learned is there at its next start, and a page that cannot be believed says
nothing."""

import os
import random
from typing import Any

import pytest

from kvtier.connectors.vllm.extensions.learning import Learning, engine_name
from kvtier.load_policy.latency import Pace
from kvtier.load_policy.prefill import Certainty, Prefill, PrefillTime
from kvtier.testing import ManualLane
from kvtier.tiers.nvme.folder import LEARNT_NAME, Learnt, read_learnt, write_learnt
from tests.clock import Clock

SAID = Learnt({"one": (1e-3, 1e-9)}, {"nvme 4096 /disk": 0.02})


@pytest.fixture
def folder(tmp_path):
    """As a tier makes it."""
    place = tmp_path / "tier"
    place.mkdir(mode=0o700)
    return place


def test_a_page_that_was_written_is_read_and_a_new_one_replaces_it(folder):
    assert read_learnt(folder) == read_learnt(folder / "none") == Learnt()
    many = Learnt({f"{number:02}" * 200: (1.0, 0.0) for number in range(100)})
    write_learnt(folder, many)
    assert [*read_learnt(folder).engines] == [f"{n}" * 60 for n in range(92, 100)]
    write_learnt(folder, SAID)
    assert read_learnt(folder) == SAID
    page = folder / LEARNT_NAME
    assert (page.stat().st_size, page.stat().st_mode & 0o777) == (4096, 0o600)


def test_a_page_that_is_damaged_anywhere_says_nothing(folder):
    write_learnt(folder, SAID)
    page, draw = folder / LEARNT_NAME, random.Random(0)
    whole = page.read_bytes()
    places = [*range(64), *(draw.randrange(4096) for _ in range(64))]
    for damaged in (
        *(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places),
        *(whole[:size] for size in (0, 1, 15, 16, 4095)),
        bytes(4096),
        os.urandom(4096),
        whole.replace(b"learnt/1", b"learnt/2"),
    ):
        page.write_bytes(damaged)
        assert read_learnt(folder) == Learnt()
    page.write_bytes(whole + b"x" * 10_000_000)
    assert read_learnt(folder) == SAID, "of a longer file one page is read"


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e4, float("nan"), float("inf")])
def test_numbers_that_no_clock_has_measured_are_left_out(folder, seconds):
    write_learnt(folder, Learnt({"a": (seconds, 0.0), "b": (1.0, -1.0)}, {"c": seconds}))
    assert read_learnt(folder) == Learnt()


def test_a_page_of_somebody_else_says_nothing_and_is_not_written_through(folder, tmp_path):
    write_learnt(folder, SAID)
    (folder / LEARNT_NAME).rename(tmp_path / "theirs")
    (folder / LEARNT_NAME).symlink_to(tmp_path / "theirs")
    before = (tmp_path / "theirs").read_bytes()
    assert read_learnt(folder) == Learnt()
    write_learnt(folder, Learnt({"two": (1.0, 0.0)}))
    assert (tmp_path / "theirs").read_bytes() == before
    (folder / LEARNT_NAME).unlink()
    folder.chmod(0o777)
    write_learnt(folder, SAID)
    assert not (folder / LEARNT_NAME).exists()


class Start:
    """An engine that starts over the folder."""

    def __init__(self, folder, engine="one"):
        self.clock, self.lane, self.pace = Clock(100.0), ManualLane(), Pace(1)
        self.learning = Learning(
            folder, engine, {"nvme 4096 /disk": self.pace}, self.clock, self.lane
        )
        self.prefill = self.learning.begin_with(Prefill(PrefillTime(5e-6), Certainty.GUESSED))

    def steps(self, per_token=None, read_s=None):
        if per_token is not None:
            for _ in range(20):
                self.prefill.learn(2048, 0.0, 2048 * per_token)
        if read_s is not None:
            self.pace.read(self.pace.begun(0.0), read_s, whole=True)
        anything: Any = None
        self.learning.report(anything)
        self.lane.run()


def test_the_next_start_begins_with_what_was_measured(folder):
    first = Start(folder)
    assert (first.prefill.known, first.pace.wait(1, 0.0)) == (Certainty.GUESSED, None)
    first.steps(read_s=0.02)
    first.steps(per_token=1e-3)
    second = Start(folder)
    assert second.prefill.known is Certainty.REMEMBERED
    assert second.prefill.seconds(1000, 0) == pytest.approx(1.0, rel=1e-3)
    assert (second.pace.wait(1, 0.0), second.pace.read_s) == (0.02, None)
    second.steps()
    third = Start(folder)
    assert third.prefill.known is Certainty.REMEMBERED, "what was only remembered is kept"
    other = Start(folder, "another engine, or this one on another device")
    assert (other.prefill.known, other.pace.wait(1, 0.0)) == (Certainty.GUESSED, 0.02)


def test_a_plan_a_bound_and_what_was_remembered_are_not_written_as_measured(folder):
    start = Start(folder)
    start.prefill.at_most(1e-9)
    start.steps()
    assert read_learnt(folder) == Learnt()
    start.steps(per_token=1e-3)
    again = Start(folder)
    again.prefill.at_most(1e-9)
    again.steps()
    assert read_learnt(folder).engines["one"][0] == pytest.approx(1e-3, rel=1e-3)


def test_the_first_measure_is_written_at_once_and_later_ones_as_they_change(folder):
    start = Start(folder)
    start.steps()
    assert not (folder / LEARNT_NAME).exists(), "there is nothing to say"
    start.steps(per_token=1e-3)
    first = (folder / LEARNT_NAME).read_bytes()
    start.steps(per_token=2e-3)
    assert (folder / LEARNT_NAME).read_bytes() == first, "not at each step"
    start.clock.now += 5.0
    start.steps()
    assert read_learnt(folder).engines["one"][0] == pytest.approx(1.7e-3, rel=0.01)
    second = (folder / LEARNT_NAME).stat().st_mtime_ns
    start.clock.now += 5.0
    start.steps(per_token=1.75e-3)
    assert (folder / LEARNT_NAME).stat().st_mtime_ns == second, "it is much the same"


def test_no_step_waits_for_the_page_and_a_full_lane_is_tried_again(folder):
    start = Start(folder)
    start.prefill.learn(2048, 0.0, 2.0)
    anything: Any = None
    start.lane.close(0.0)
    start.learning.report(anything)
    assert not (folder / LEARNT_NAME).exists()
    assert not start.learning._speed_told


def test_an_engine_is_its_fingerprint_on_a_device():
    names = {engine_name(bytes([n]) * 32, device) for n in (1, 2) for device in ("cpu 2", "cpu 4")}
    assert len(names) == 4
    assert max(map(len, names)) <= 64
