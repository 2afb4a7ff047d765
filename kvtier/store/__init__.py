"""The Store: which tier has which chunk, what is in use, promoted, spilled and evicted."""
