"""What a long run in parts keeps between them: steps of the code there is, and of other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trust.engine.record import Record, code_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


def test_steps_of_code_that_has_changed_count_for_nothing_and_are_told_apart(file: Path) -> None:
    Record(file, "0.32.0", "old").add("drafts", 2_000, 5, [])
    record = Record(file, "0.32.0", "new")
    told = record.of("drafts")
    assert (told["steps"], told["before"]) == (0, 2_000)
    assert told["seed"] == 6, "new code meets users that the old one has not met"
    record.add("drafts", 400, 1, [])
    newer = Record(file, "0.32.0", "newer").of("drafts")
    assert (newer["steps"], newer["before"]) == (0, 2_400)
    again = Record(file, "0.32.0", "new").of("drafts")
    assert (again["steps"], again["before"]) == (400, 2_000)


def test_steps_of_another_vllm_are_its_own(file: Path) -> None:
    Record(file, "0.32.0", "code").add("drafts", 2_000, 5, [])
    assert Record(file, "0.33.0", "code").of("drafts")["steps"] == 0
    assert Record(file, "0.32.0", "code").of("drafts")["steps"] == 2_000


def test_a_part_with_a_violation_counts_for_nothing_and_is_run_again(file: Path) -> None:
    Record(file, "0.32.0", "code").add("drafts", 900, 3, ["drafts, seed 3: token 7 is another"])
    told = Record(file, "0.32.0", "code").of("drafts")
    assert (told["steps"], told["seed"]) == (0, 1)
    assert told["violations"] == ["drafts, seed 3: token 7 is another"]


BEFORE = 'def end(of):\n    """Where it ends."""\n    return of + 1\n'


@pytest.mark.parametrize(
    ("after", "is_other"),
    [
        ("def end(of):\n    return of + 2\n", True),
        ("def end(of, by=1):\n    return of + 1\n", True),
        ('# why\ndef end(of):\n    """Its end."""\n\n    return (of + 1)\n', False),
    ],
)
def test_code_is_another_when_it_does_something_else(
    tmp_path: Path, after: str, is_other: bool
) -> None:
    room = tmp_path / "store"
    room.mkdir()
    file = room / "ends.py"
    file.write_text(BEFORE)
    before = code_of([tmp_path])
    file.write_text(after)
    assert (code_of([tmp_path]) != before) == is_other
    file.write_text(BEFORE)
    assert code_of([tmp_path]) == before
    file.rename(room / "starts.py")
    assert code_of([tmp_path]) != before
