"""``python -m kvtier.bench.multi_turn``: ``kvtier bench multi-turn``."""

import sys

from kvtier.cli.main import main

sys.exit(main(["bench", "multi-turn", *sys.argv[1:]]))
