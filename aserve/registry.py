"""A table of named choices, loaded lazily, each with the reason why it cannot be used here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar

from aserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: where the class lives and what keeps it from being used (None if nothing does)."""

    target: str  # "package.module:Name"
    refusal: Callable[[], str | None] = lambda: None


class Registry(Generic[T]):
    """Explicit rows; unknown names are refused with the list of known ones."""

    def __init__(self, kind: str, entries: Mapping[str, Entry]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    @property
    def names(self) -> list[str]:
        """All registered names, usable here or not."""
        return list(self._entries)

    def refusals(self) -> dict[str, str | None]:
        """Map each name to the reason why it is refused on this machine, None if it is usable."""
        return {name: entry.refusal() for name, entry in self._entries.items()}

    def load(self, name: str) -> T:
        """Return what ``name`` stands for; raise ConfigError if it is unknown or refused here."""
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}")
        if reason := entry.refusal():
            raise ConfigError(f"{self.kind} {name!r} cannot be used here: {reason}")
        module, _, attribute = entry.target.partition(":")
        loaded: T = getattr(import_module(module), attribute)
        return loaded
