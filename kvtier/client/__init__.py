"""An engine's side of a kvtier server: connect, attach, hold leases."""
