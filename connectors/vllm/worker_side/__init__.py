"""Half of the connector in a worker: copies, and what the loaded model says of itself."""
