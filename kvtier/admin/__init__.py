"""The HTTP interface of a server: health, metrics, counts, lookup, purge."""
