"""``python -m kvtier.bench.long_doc_qa``."""

import sys

from kvtier.bench.long_doc_qa.run import main

sys.exit(main())
