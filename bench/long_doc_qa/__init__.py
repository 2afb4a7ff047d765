"""Long Doc QA: time to first token over long documents that come again, without a cache and with
each."""
