"""Owner: the same number on every server and after every restart, and who may drop what."""

import sys

from kvtier.core.tenant import OWNER_BYTES, UNOWNED, may, owner_of, tenant
from tests.command import ran

MODEL, OTHER = bytes(32), bytes(range(32))
NAMES = ["", "acme", "acmf", "Acme", "ac", "a" * 64, "\N{SNOWMAN}"]


def test_the_number_is_part_of_what_lies_on_disks_and_does_not_change():
    assert owner_of(MODEL, "acme") == 0x6C04919CEAC5136F163BC5D9F60EBA6A
    code = "from kvtier.core.tenant import owner_of; print(owner_of(bytes(32), 'acme'))"
    told = ran([sys.executable, "-c", code]).stdout
    assert int(told) == owner_of(MODEL, "acme")


def test_names_and_models_are_told_apart_and_fit():
    owners = [owner_of(model, name) for model in (MODEL, OTHER) for name in NAMES]
    assert len({UNOWNED, *owners}) == len(owners) + 1
    assert all(owner < 1 << 8 * OWNER_BYTES for owner in owners)


def test_a_tenant_is_all_its_models_and_nobody_but_no_other_tenant():
    for name in NAMES:
        allowed = {
            (model, other)
            for model in (MODEL, OTHER)
            for other in NAMES
            if may(tenant(name), owner_of(model, other))
        }
        assert allowed == {(MODEL, name), (OTHER, name)}
        assert may(tenant(name), UNOWNED) and may(owner_of(MODEL, name), UNOWNED)
        assert may(None, owner_of(MODEL, name)) and may(None, UNOWNED)
        assert may(owner_of(MODEL, name), owner_of(MODEL, name))
        assert not may(owner_of(MODEL, name), owner_of(OTHER, name)), (
            "an engine drops only its own model's"
        )
