"""The mutants still fit the source, and the simulation kills one. ``python -m tests.trust.mutants``
tries them all."""

import pytest

from tests.trust.mutants import MUTANTS, ROOMS, copy_package, defective, try_mutant


def test_there_are_enough():
    assert len(MUTANTS) >= 25
    assert len(set(MUTANTS)) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.where}: {mutant.breaks}")
def test_each_fits_the_source_exactly_once(mutant):
    file, text = defective(mutant)
    compile(text, file, "exec", dont_inherit=True)
    assert mutant.pattern != mutant.replacement


def test_the_simulation_kills_one(tmp_path):
    """Else every green run of it may mean nothing."""
    copy_package(tmp_path)
    mutant = next(
        mutant
        for mutant in MUTANTS
        if mutant.breaks == "a load serves chunks that have not arrived"
    )
    assert (
        try_mutant(mutant, tmp_path, {"simulation": ROOMS["decisions"].suites["simulation"]}).killer
        == "simulation"
    )
