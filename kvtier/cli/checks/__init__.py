"""Checks of ``kvtier doctor`` by subject. Those of a start are in :mod:`kvtier.started`."""
