"""Files of a recording: whatever is written when, they are bounded, and none is written twice."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.store.observers.record import Rotation

FILE, AGE, MOST = 1000, 60.0, 5000
WRITES = st.lists(
    st.tuples(st.floats(-90, 90), st.integers(1, 900), st.booleans()), min_size=1, max_size=120
)
FOUND = st.lists(st.integers(0, 2000), max_size=8)


@given(FOUND, WRITES)
def test_files_follow_each_other_within_their_bounds(sizes, writes):
    found = [(f"requests-{at:015d}.jsonl", size) for at, size in enumerate(sizes)]
    rotation = Rotation(list(found), FILE, AGE, MOST)
    files, now, begun, open_name = dict(found), 1e6, 0.0, ""
    for passed, count, fails in writes:
        now = max(1.0, now + passed)
        place = rotation.place(now, count)
        for name in place.leaving:
            assert name == min(files), "the oldest leaves first"
            del files[name]
        if place.is_new:
            assert place.name > max(files, default=""), "files are in the order of their names"
            files[place.name], begun, open_name = 0, now, place.name
        assert place.name == open_name
        assert 0 <= now - begun < AGE
        if fails:
            if not files[open_name]:
                del files[open_name]
            rotation.end()
            open_name = ""
            continue
        files[place.name] += count
        rotation.wrote(count)
        assert files[place.name] <= FILE
        assert sum(files.values()) <= MOST
