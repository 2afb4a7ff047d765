"""``python -m kvtier.bench.queue``: ``kvtier bench queue``."""

import sys

from kvtier.cli.main import main

sys.exit(main(["bench", "queue", *sys.argv[1:]]))
