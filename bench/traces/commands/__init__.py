"""Commands on recorded requests: simulate and replay."""
