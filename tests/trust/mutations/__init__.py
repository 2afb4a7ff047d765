"""Mutants by room: every module here but ``room`` has one ``ROOM``."""
