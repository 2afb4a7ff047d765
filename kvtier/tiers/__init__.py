"""Places below pinned RAM that keep chunks. One module a tier. :mod:`kvtier.tiers.base` holds their
promises."""
