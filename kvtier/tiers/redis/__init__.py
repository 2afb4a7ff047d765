"""Chunks in Redis, a Redis Cluster, or behind Sentinel."""
