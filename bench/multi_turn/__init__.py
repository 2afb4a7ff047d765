"""Multi-turn: conversations on several engines behind a router, in turns or sticky, with a shared
cache or without."""
