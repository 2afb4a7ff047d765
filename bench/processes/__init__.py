"""The processes that benchmarks start: engines, servers, Redis, S3."""
