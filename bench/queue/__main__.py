"""``python -m kvtier.bench.queue``."""

import sys

from kvtier.bench.queue.run import main

sys.exit(main())
