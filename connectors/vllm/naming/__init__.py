"""Naming: which parts of an engine, its weights and a request decide the bytes of a chunk."""
