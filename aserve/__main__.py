"""``python -m aserve`` is the ``aserve`` command."""

import sys

from aserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
