"""Store: which tier has which chunk, and what is in use, promoted, spilled and evicted."""
