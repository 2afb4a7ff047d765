"""``python -m kvtier.bench.spans``."""

import sys

from kvtier.bench.spans.run import main

sys.exit(main())
