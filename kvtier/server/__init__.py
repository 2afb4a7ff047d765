"""One cache for several engines: listeners, connections, sessions, and Stores by slot size."""
