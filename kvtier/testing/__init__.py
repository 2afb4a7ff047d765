"""Parts of tests of kvtier and of your own tiers. Shipped, and as public as the library."""

from kvtier.testing.check_tier import check_tier
from kvtier.testing.doubles import DictTier, ManualLane

__all__ = ["DictTier", "ManualLane", "check_tier"]
