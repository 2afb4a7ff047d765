"""RAM's slots by themselves: which are free, which leave, and in which order they come back."""

from kvtier.store.slots import RamSlots


def lent(count, *given):
    """So many slots, of which these have given their memory back."""
    slots = RamSlots(count)
    slots.free = [slot for slot in slots.free if slot not in given]
    slots.gave_back(given)
    slots.limit = count - len(given)
    return slots


def test_the_slots_that_are_told_to_come_next_are_those_that_come():
    for most, told in ((0, []), (1, [3]), (2, [3, 1]), (3, [3, 1, 2]), (9, [3, 1, 2])):
        slots = lent(5, 2, 1, 3)
        assert slots.next_given(most) == told
        before = set(slots.free)
        slots.limit += most
        slots.refill()
        assert [slot for slot in slots.free if slot not in before] == told


def test_a_slot_that_comes_back_is_free_while_no_more_are_in_use_than_may_be():
    slots = lent(4, 2, 3)
    used = slots.free.pop()
    slots.put_back([used])
    assert slots.free[-1] == used and not slots.leaving(4)
    used = slots.free.pop()
    slots.limit = 1
    slots.put_back([used])
    assert slots.leaving(4) == [used] and used not in slots.free
    assert len(slots) == 4 and slots.occupied == 2


def test_of_slots_that_come_back_together_as_many_leave_as_are_too_many():
    slots = RamSlots(5)
    used = [slots.free.pop() for _ in range(3)]
    slots.limit = 3
    slots.free.clear()
    slots.put_back(used)
    assert slots.leaving(5) == used[:2] and slots.free == used[2:]
