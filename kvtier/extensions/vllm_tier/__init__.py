"""A kvtier server as a secondary tier under vLLM's own OffloadingConnector (README.md)."""
