"""Names of chunks: what of an engine, its weights and a request decides their bytes."""
