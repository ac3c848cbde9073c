"""`python -m regard` is the command `regard`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
