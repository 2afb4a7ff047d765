"""Peers and kvtier, side by side on one machine: ``python -m kvtier.bench.compare``."""
