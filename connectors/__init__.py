"""Connectors: where engines and kvtier meet. One folder an engine."""
