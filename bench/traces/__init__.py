"""Recorded requests: how they are read, and what a cache of any size would have done with them."""
