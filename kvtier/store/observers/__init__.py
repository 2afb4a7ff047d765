"""Those who watch a Store: each hangs on :mod:`kvtier.store.observer`."""
