"""The tiers alone, without an engine: ``python -m kvtier.bench.compare.alone``."""
