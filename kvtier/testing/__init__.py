"""What tests of kvtier, and of tiers of your own, are built from. Shipped, and kept as public as
the library."""

from kvtier.testing.check_tier import check_tier
from kvtier.testing.faulty import DictTier, Fault, FaultyTier, ManualLane, Plan, seeded

__all__ = ["DictTier", "Fault", "FaultyTier", "ManualLane", "Plan", "check_tier", "seeded"]
