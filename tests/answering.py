"""Sessions of a server whose questions a test answers all at once."""

from kvtier.core.steps import whole
from kvtier.server import session
from kvtier.server.registry import SizeClass


class Session(session.Session):
    """It shares ``shares`` and ``pace`` with nobody, unless they are given."""

    def __init__(self, store, owner, shares=None, pace=None, announced=None):
        size_class = SizeClass(store, lambda call: call())
        size_class.shares = shares or size_class.shares
        size_class.pace = pace or size_class.pace
        super().__init__(size_class, owner, announced)

    def answer(self, question):
        return whole(self.begin(question))

    def end(self):
        whole(self.ending())
