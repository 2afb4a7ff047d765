"""The HTTP surface of a server: health, metrics, counts, lookup, purge."""
