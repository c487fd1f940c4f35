"""The argument parser of the command: a mistake is answered with what was probably meant, not with all flags."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from aserve.suggestion import did_you_mean


class FlagParser(argparse.ArgumentParser):
    """Refuses unknown flags where they stand, so that a command suggests from its own flags."""

    def parse_known_args(  # type: ignore[override]  # typeshed's overloads tell apart namespaces that nobody passes
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the namespace and no leftovers. Commands are parsed by this method, the whole line too."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain(unknown))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and say what is wrong in one line; the flags fill a screen and are for ``--help``."""
        self.exit(2, f"{self.prog}: error: {message}\nSee `{self.prog} --help`.\n")

    def _explain(self, unknown: Sequence[str]) -> str:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument {unknown[0]!r}"
        return f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}"
