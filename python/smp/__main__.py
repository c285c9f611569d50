"""``python -m smp``: the command ``smp``."""

import sys

from smp_cli.main import main

sys.exit(main())
