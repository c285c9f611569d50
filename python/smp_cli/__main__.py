"""``python -m smp_cli``: the command without torch, from a tree that is not installed."""

import sys

from smp_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
