"""What benchmarks ask of an engine, and the client that asks it."""
