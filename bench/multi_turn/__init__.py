"""Multi-turn: conversations on two engines behind a router, with and without a shared cache."""
