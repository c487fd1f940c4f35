"""Plain-data pictures of the scheduler: an object graph to JSON values and back.

Only classes of the host packages and built-in containers are accepted, in both directions, so reading a picture runs
no code of its author's choice. Shared and cyclic references survive, and no recursion depth depends on the graph.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from types import FunctionType
from typing import Any

PACKAGES = ("aserve.scheduler.", "aserve.cache.", "aserve.request:", "aserve.engine.trace:refuse_seed")
SCALARS = {int, float, str, bool, type(None)}
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
PAGES = "list of tuples"  # of scalars, as the prefix tree has one for each page; written without references
VALUES = (PAGES, "tuple", "frozenset", "bytearray", "ref", "enum")  # made whole, before others are filled


def take(root: object) -> list[Any]:
    """Return one entry per object: ``[type name, payload]``; the root comes first, references are ``[index]``."""
    return _Picture().draw(root)


def restore(entries: list[Any]) -> Any:
    """Build the objects of ``take`` again and return the root; raises ValueError for what ``take`` never writes."""
    objects = [_allocate(kind, payload) for kind, payload in entries]
    for index, (kind, _) in enumerate(entries):
        if kind in ("tuple", "frozenset"):
            _build_frozen(index, entries, objects)
    for target, (kind, payload) in zip(objects, entries, strict=True):
        if kind not in VALUES:
            _fill(target, kind, payload, objects)
    return objects[0]


class _Picture:
    """One traversal, breadth first."""

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}
        self._objects: list[object] = []  # keeps them alive, so that ids stay unique

    def draw(self, root: object) -> list[Any]:
        self._refer(root)
        entries = []
        for item in self._objects:  # grows while it is walked
            entries.append(self._entry(item))
        return entries

    def _refer(self, item: Any) -> Any:
        """Return a scalar as it is, anything else as a reference."""
        if type(item) in SCALARS:
            return item
        index = self._indices.setdefault(id(item), len(self._objects))
        if index == len(self._objects):
            self._objects.append(item)
        return [index]

    def _entry(self, item: Any) -> list[Any]:
        cls = type(item)
        kind = cls.__name__
        if cls is SEQUENCES.get(kind):
            if SCALARS.issuperset(map(type, item)):  # the long lists of token ids and pages
                return [kind, list(item)]
            if cls is list and all(type(member) is tuple and SCALARS.issuperset(map(type, member)) for member in item):
                return [PAGES, list(item)]
            return [kind, [self._refer(member) for member in item]]
        if isinstance(item, bytearray):
            return [kind, list(item)]
        if cls is MAPPINGS.get(kind):
            return [kind, [(self._refer(key), self._refer(member)) for key, member in item.items()]]
        if isinstance(item, FunctionType | type):
            return ["ref", _path(item)]
        if isinstance(item, Enum):
            return ["enum", [_path(cls), item.name]]
        return [_path(cls), {name: self._refer(getattr(item, name)) for name in _fields(item)}]


def _path(item: "type | FunctionType | Callable[..., Any]") -> str:
    path = f"{item.__module__}:{item.__qualname__}"
    _check(path)
    return path


def _check(path: str) -> None:
    if not path.startswith(PACKAGES) or "<" in path:
        raise ValueError(f"{path} has no place in a trace")


def _fields(item: object) -> list[str]:
    names = [name for cls in type(item).__mro__ for name in _slots(cls) if hasattr(item, name)]
    return [*names, *getattr(item, "__dict__", ())]


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _find(path: str) -> Any:
    _check(path)
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    if _path(found) != path:  # something that the module has only imported
        raise ValueError(f"{path} has no place in a trace")
    return found


def _allocate(kind: str, payload: Any) -> Any:
    """Make the object, still empty unless it is a value; None for what is built from its members."""
    if kind in ("tuple", "frozenset"):
        return None
    if kind == "ref":
        return _find(payload)
    if kind == "enum":
        return _find(payload[0])[payload[1]]
    if kind == PAGES:
        return [tuple(member) for member in payload]
    if kind == "bytearray":
        return bytearray(payload)
    container = SEQUENCES.get(kind) or MAPPINGS.get(kind)
    if container is not None:
        return container()
    cls = _find(kind)
    return cls.__new__(cls)


def _build_frozen(index: int, entries: list[Any], objects: list[Any]) -> None:
    """Build a tuple or frozenset after those among its members that are such, too."""
    stack = [index]
    while stack:
        kind, payload = entries[stack[-1]]
        missing = [
            item[0]
            for item in payload
            if isinstance(item, list) and objects[item[0]] is None and entries[item[0]][0] in ("tuple", "frozenset")
        ]
        if missing:
            stack.extend(missing)
            continue
        objects[stack.pop()] = SEQUENCES[kind](_resolve(item, objects) for item in payload)


def _fill(target: Any, kind: str, payload: Any, objects: list[Any]) -> None:
    if kind in MAPPINGS:
        target.update((_resolve(key, objects), _resolve(item, objects)) for key, item in payload)
    elif kind == "set":
        target.update(_resolve(item, objects) for item in payload)
    elif kind in SEQUENCES:
        target.extend(_resolve(item, objects) for item in payload)
    else:
        for name, item in payload.items():
            object.__setattr__(target, name, _resolve(item, objects))


def _resolve(item: Any, objects: list[Any]) -> Any:
    return objects[item[0]] if isinstance(item, list) else item
