"""What tiers on other machines are made of, whose store others write to too. It is no tier
itself."""
