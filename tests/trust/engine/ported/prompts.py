"""What most cases begin with."""

import pytest

from tests.trust.engine.cells import CHUNK, words

MODES = pytest.mark.parametrize(
    "mode", [{}, {"async_scheduling": True}], ids=["one batch", "async"]
)
PROMPT = words(5 * CHUNK + 1)
