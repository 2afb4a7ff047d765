"""What tiers on other machines are made of, whose store others write to too. Redis, buckets and
Mooncake's pool are such tiers. It is no tier itself."""
