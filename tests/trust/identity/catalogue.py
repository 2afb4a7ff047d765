"""All rows, and the engines that they begin with."""

from tests.trust.identity import adapters, configured, content, media, places
from tests.trust.identity.rows import Base, Row

_ROOMS = (content, configured, adapters, media, places)
BASES: list[Base] = [base for room in _ROOMS for base in room.BASES]
ROWS: list[Row] = [row for room in _ROOMS for row in room.ROWS]
