"""``python -m smp``: the command ``smp``."""

import sys

from smp_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
