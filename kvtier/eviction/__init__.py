"""Eviction: orders of chunks, shadows that choose among them, and clients' hints."""
