"""Reports of a Store: status, metrics, timings, and the reasons of misses."""
