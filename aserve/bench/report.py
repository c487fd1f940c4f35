"""Results as text: markdown tables, percentiles, JSON files."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from aserve.errors import ClientError


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay rows with the same keys out as a markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_format_value(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of ``values`` lie, by linear interpolation; NaN if empty."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def print_result(result: Mapping[str, Any], text: str, json_file: str | None) -> None:
    """Print ``text`` and write ``result`` to ``json_file``; "-" prints the JSON instead of the text."""
    if json_file == "-":
        print(orjson.dumps(result).decode())
        return
    print(text)
    if json_file is not None:
        write_file(json_file, orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        print(f"wrote {json_file}", file=sys.stderr)


def write_file(name: str, content: bytes) -> None:
    """Write a result; raises ClientError if that is not possible."""
    try:
        Path(name).write_bytes(content)
    except OSError as error:
        raise ClientError(f"cannot write {name}: {error.strerror}") from error
