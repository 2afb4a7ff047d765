"""The GPU path on the machine's own GPU: ``python -m kvtier.bench.gpu``."""
