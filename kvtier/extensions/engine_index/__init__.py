"""Engines: what vLLM's own caches hold, followed by the events that the engines publish."""
