"""One cache for several engines: listeners, connections, sessions, Stores by slot size."""
