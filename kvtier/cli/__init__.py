"""The ``kvtier`` command, with one file for each subcommand."""
