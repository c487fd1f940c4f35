"""Reasoning as ``encrypted_content``: agents that keep no state here, Codex for one, send back nothing else of it.

Nothing is secret in it: the same text stands beside it in ``content``.
"""

import base64
import binascii

PREFIX = "aserve1."


def pack_reasoning(text: str) -> str:
    """Return ``text`` as an opaque string."""
    return PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def unpack_reasoning(packed: str) -> str | None:
    """Return the text that ``pack_reasoning`` was given, None for a string that it did not make."""
    if not packed.startswith(PREFIX):
        return None
    try:
        return base64.b64decode(packed[len(PREFIX) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
