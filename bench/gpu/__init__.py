"""What the GPU path reaches on the machine's own GPU: ``python -m kvtier.bench.gpu``."""
