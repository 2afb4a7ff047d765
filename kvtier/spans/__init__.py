"""Prompts with retrieved documents: how to put them together, and what to warm for them.

The functions are pure, and they need neither torch nor vLLM. A client can import them.
"""

from kvtier.spans.prompts import Composed, Home, Range, compose, homes

__all__ = ["Composed", "Home", "Range", "compose", "homes"]
