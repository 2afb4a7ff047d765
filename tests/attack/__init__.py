"""What attackers do, as small functions for tests and the suite of attacks: one module a door. Each
is bounded in count, bytes and time, and reaches loopback only."""
