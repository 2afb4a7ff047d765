"""The scheduler's half of the connector: what runs in vLLM's scheduling loop."""
