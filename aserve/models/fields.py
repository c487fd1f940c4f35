"""Typed reading of the fields of config.json and of GGUF metadata."""

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from aserve.errors import ConfigError

T = TypeVar("T", int, float, bool, str)


class Fields:
    """A mapping from a file, read field by field; a missing or wrong field is a ConfigError that names it.

    null counts as absent, as in transformers. ``prefix`` goes before each name, for GGUF's "llama.".
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    @overload
    def get(self, name: str, kind: type[T]) -> T | None: ...
    @overload
    def get(self, name: str, kind: type[T], default: T) -> T: ...
    def get(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """Return the field as ``kind``, or ``default`` where it is absent."""
        value = self._values.get(self._prefix + name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self._prefix}{name} must be of type {kind.__name__}, got {value!r}")
        return value

    def require(self, name: str, kind: type[T]) -> T:
        """Return the field as ``kind``; raise if it is absent."""
        value = self.get(name, kind)
        if value is None:
            raise ConfigError(f"the model's config lacks {self._prefix}{name}")
        return value

    def get_size(self, name: str) -> int | None:
        """Return a field that counts something, or None where it is absent."""
        value = self.get(name, int)
        if value is not None and value <= 0:
            raise ConfigError(f"{self._prefix}{name} must be positive, got {value}")
        return value

    def require_size(self, name: str) -> int:
        """Return a field that counts something; raise if it is absent."""
        value = self.get_size(name)
        return self.require(name, int) if value is None else value

    def get_positive(self, name: str) -> float | None:
        """Return a field that divides or caps something, or None where it is absent."""
        value = self.get(name, float)
        if value is not None and not value > 0:
            raise ConfigError(f"{self._prefix}{name} must be positive, got {value}")
        return value

    def get_fields(self, name: str) -> "Fields":
        """Return the fields of a field, none where it is absent."""
        value = self._values.get(self._prefix + name)
        return Fields(value if isinstance(value, Mapping) else {})

    def require_floats(self, name: str) -> tuple[float, ...]:
        """Return a field that lists numbers; raise if it is absent."""
        values = self._values.get(self._prefix + name)
        if values is None:
            raise ConfigError(f"the model's config lacks {self._prefix}{name}")
        if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
            raise ConfigError(f"{self._prefix}{name} must be a list of numbers, got {values!r}")
        return tuple(map(float, values))

    def __bool__(self) -> bool:
        return bool(self._values)

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._values

    def refuse(self, name: str, what: str) -> None:
        """Raise if the field is present and neither null, false, zero nor empty."""
        if value := self._values.get(self._prefix + name):
            raise ConfigError(f"unsupported {what}: {self._prefix}{name} is {value!r}")
