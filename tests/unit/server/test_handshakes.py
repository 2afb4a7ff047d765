"""Places of those who have not said who they are: few, and never full for the next one."""

import pytest

from kvtier.server.strangers import Handshakes


def test_one_address_pushes_out_its_own_oldest_only():
    places: Handshakes[int] = Handshakes(64, 3)
    places.enter(0, "10.0.0.1")
    assert [places.enter(one, "10.0.0.2") for one in range(1, 7)] == [None, None, None, 1, 2, 3]
    assert 0 in places and len(places._under_way) == 4


def test_when_all_is_full_the_address_with_most_makes_room():
    places: Handshakes[str] = Handshakes(4, 3)
    for one, address in (
        ("a", "10.0.0.1"),
        ("b", "10.0.0.2"),
        ("c", "10.0.0.3"),
        ("d", "10.0.0.2"),
    ):
        assert places.enter(one, address) is None
    assert places.enter("e", "10.0.0.4") == "b"
    assert places.enter("f", "10.0.0.5") == "a", "nobody has most: the oldest"
    assert len(places._under_way) == 4


def test_who_leaves_makes_room():
    places: Handshakes[int] = Handshakes(2, 1)
    places.enter(1, "10.0.0.1")
    places.leave(1)
    places.leave(1)
    assert places.enter(2, "10.0.0.1") is None and len(places._under_way) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8::1", "2001:db8::ffff"),
        ("fe80::1%eth0", "fe80::2%eth0"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_one_host_has_many_addresses_and_counts_once(one, other):
    places: Handshakes[int] = Handshakes(9, 1)
    assert (places.enter(1, one), places.enter(2, other)) == (None, 1)


def test_networks_are_apart():
    places: Handshakes[int] = Handshakes(9, 1)
    assert [places.enter(at, f"2001:db8:0:{at}::1") for at in range(5)] == [None] * 5
    assert places.enter(9, "no address") is None
