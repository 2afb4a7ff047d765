"""."""
BASES: list = []
ROWS: list = []
