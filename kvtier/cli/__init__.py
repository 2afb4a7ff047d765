"""The ``kvtier`` command: one file a subcommand."""
