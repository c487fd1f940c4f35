"""Set-up of logging for the command line; libraries and tests leave it alone."""

import logging
import sys


def configure_logging(level: str) -> None:
    """Send records of ``level`` and above to standard error, one line each."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
