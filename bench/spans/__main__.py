"""``python -m kvtier.bench.spans``: ``kvtier bench spans``."""

import sys

from kvtier.cli.main import main

sys.exit(main(["bench", "spans", *sys.argv[1:]]))
