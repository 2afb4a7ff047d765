"""What a Store tells of itself: status, metrics, timings, and the reasons of misses."""
