"""The attacker's side, one file for each door. Each attack is bounded in time and bytes, and says
how much of it got through. What the others felt is for the caller to see."""
