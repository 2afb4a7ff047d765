"""``python -m kvtier``: the ``kvtier`` command, where the folder of scripts is not on the path."""

import sys

from kvtier.cli.main import main

sys.exit(main())
