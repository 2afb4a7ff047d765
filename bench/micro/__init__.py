"""Benchmarks of one part each. ``make bench`` runs them all."""
