"""Chunks in the memory of many hosts, through Mooncake's store."""
