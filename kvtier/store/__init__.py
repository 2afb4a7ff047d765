"""The Store: which tier has which chunk, which are in use, and what is promoted, spilled and
evicted."""
