"""Prompts of benchmarks, and the client that asks them."""
