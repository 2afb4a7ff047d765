"""Parts of tiers on other machines, whose store others write to too."""
