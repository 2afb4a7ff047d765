"""What attackers do, as small functions that tests and ``make attack`` call: one module a door. Each
is bounded in count, bytes and time, and reaches loopback only.
"""
