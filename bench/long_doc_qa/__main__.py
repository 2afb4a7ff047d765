"""``python -m kvtier.bench.long_doc_qa``: ``kvtier bench long-doc-qa``."""

import sys

from kvtier.cli.main import main

sys.exit(main(["bench", "long-doc-qa", *sys.argv[1:]]))
