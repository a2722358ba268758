"""`python -m sinkcache`: the command line."""

import sys

from sinkcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
