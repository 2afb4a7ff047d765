"""Tables of pages that stand between marks, as tests read them."""

from tests.conftest import ROOT


def rows(page, name):
    """The cells of each row between ``<!-- begin NAME -->`` and its end, without the head.
    ``page``: its path in the project."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]
    return [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
