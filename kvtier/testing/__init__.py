"""Parts of tests of kvtier, and of tiers of your own. Shipped, and kept as public as
the library."""

from kvtier.testing.check_tier import check_tier
from kvtier.testing.doubles import DictTier, ManualLane

__all__ = ["DictTier", "ManualLane", "check_tier"]
