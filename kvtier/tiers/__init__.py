"""Tiers below pinned RAM, a package each. :mod:`kvtier.tiers.base` holds their promises."""
