"""``python -m kvtier.bench.multi_turn``."""

import sys

from kvtier.bench.multi_turn.run import main

sys.exit(main())
