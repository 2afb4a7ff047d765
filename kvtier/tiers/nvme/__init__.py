"""Chunks on a local disk."""
