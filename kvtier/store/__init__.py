"""The Store: which tier has which chunk, who uses it, and what is promoted, spilled and evicted."""
