"""Benchmarks: each writes the project's one results form (:mod:`kvtier.bench.report`) and names its
command."""
