"""Observers of a Store (:mod:`kvtier.store.observer`)."""
