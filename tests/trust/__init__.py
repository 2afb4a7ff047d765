"""The trust suite: never wrong, never lost, never stuck. ``python -m tests.trust`` runs it all and
says what it saw."""
