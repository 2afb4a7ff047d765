"""Half of the connector in the scheduler: what runs in vLLM's scheduling loop."""
