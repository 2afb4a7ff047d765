"""A worker's half of the connector: copies, and what the loaded model says of itself."""
