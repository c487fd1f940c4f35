"""What somebody meant by a name that does not exist."""

import difflib
from collections.abc import Iterable

MIN_LIKENESS = 0.7  # of difflib's ratio: one or two slips in a word, not another word


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the known name most like ``name`` in any case, nothing if none is near."""
    spellings = {spelling.lower(): spelling for spelling in known}
    near = difflib.get_close_matches(name.lower(), list(spellings), n=1, cutoff=MIN_LIKENESS)
    return f"; did you mean {spellings[near[0]]}?" if near else ""
