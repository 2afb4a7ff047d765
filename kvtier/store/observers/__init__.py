"""The observers of a Store (:mod:`kvtier.store.observer`)."""
