"""Spans: prompts of documents that a search found, in varying order; what of them is reused."""
