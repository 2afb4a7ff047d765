"""Chunks in an object store (S3, Google Cloud Storage, Azure) that hosts share."""
