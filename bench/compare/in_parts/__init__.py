"""Loads in parts on a real engine."""
