"""Sizes as people write them."""

from __future__ import annotations

import re


def parse_size(given: object) -> int:
    """Bytes of ``4GiB``, ``4Gi``, ``512MB``, ``1.5 GB``, ``1073741824``. Raises ValueError for
    anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", str(given).lower())
    if found is None:
        raise ValueError(given)
    number, prefix, binary = found.groups(default="")
    size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
    if size < 1:
        raise ValueError(given)
    return size
