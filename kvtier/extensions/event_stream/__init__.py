"""KV events for routers: those of one engine's tiers, and a server's own stream."""
