"""How long loads and prefill take, and what of a hit is worth taking."""
