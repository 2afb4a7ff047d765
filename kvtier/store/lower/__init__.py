"""Tiers below RAM as a Store uses them: their indexes, promotions, spills and budgets."""
