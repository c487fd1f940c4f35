"""A regular expression, rewritten to match what it matches as it stands within a JSON string.

Quotes, backslashes and control characters are written as escapes there. All other characters stay as they are, so
only the parts of an expression that match single characters change; what joins them is copied.
"""

import re
from dataclasses import dataclass

from aserve.errors import ClientError

CONTROLS = frozenset(range(0x20))
ESCAPED = CONTROLS | {ord('"'), ord("\\")}
SPACES = frozenset({9, 10, 11, 12, 13})
SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
OUTSIDE = r'[\x00-\x1f"\\]'
LETTERS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
PERL = {"d": frozenset(), "w": frozenset(), "s": SPACES}  # what classes have of the escaped characters
POSIX = {
    **dict.fromkeys(("alnum", "alpha", "digit", "lower", "upper", "word", "xdigit"), frozenset()),
    "ascii": ESCAPED, "blank": frozenset({9}), "cntrl": CONTROLS, "graph": ESCAPED - CONTROLS,
    "print": ESCAPED - CONTROLS, "punct": ESCAPED - CONTROLS, "space": SPACES,
}  # fmt: skip
HARMLESS_PROPERTY = re.compile(
    r"L[&CmotlLu]?|N[dlo]?|M[nce]?|S[mcko]?|Z[sp]?|Script=\w+|sc=\w+|Letter|Number|Alphabetic"
)
NUMBER = re.compile(
    r"x\{([0-9A-Fa-f]{1,8})\}|x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})"
)
PROPERTY = re.compile(r"[pP](?:\{(\^?)([^}]*)\}|(\w))")
RANGE = re.compile(r"-(?![\]-])")
GROUP = re.compile(r"\?(?:P?<\w+>|([a-zA-Z-]*)(:|\)))")
FLAGS = re.compile(r"[isu]*(?:-[isu]+)?")

MAX_DEPTH = 100
OPERATORS = ("&&", "--", "~~")  # between sets within a class

Members = frozenset[int]  # of ESCAPED, that a class has


def within_json_string(pattern: str, *, flags: str = "") -> tuple[str, bool]:
    """Return ``pattern`` (in the syntax of Rust's ``regex``) as within a JSON string, and whether anything changed.

    Anchors at both ends are left out. Raises ClientError for what cannot be rewritten.
    """
    rewriting = _Rewriting(without_anchors(pattern), dots_match_lines="s" in flags)
    text = rewriting.run()
    return (f"(?i:{text})" if "i" in flags else text), rewriting.has_escapes


def without_anchors(pattern: str) -> str:
    """Return ``pattern`` without the anchors around it, which whole texts are held to anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        return pattern[:-1]
    return pattern


@dataclass
class _Rewriting:
    """One expression, read from left to right."""

    pattern: str
    dots_match_lines: bool
    place: int = 0
    depth: int = 0  # of classes
    has_escapes: bool = False

    def run(self) -> str:
        pieces: list[str] = []
        dots: list[bool] = []  # what a dot meant where the open groups began
        while self.place < len(self.pattern):
            char = self.pattern[self.place]
            if char == "(":
                dots.append(self.dots_match_lines)
                pieces.append(self._open_group(dots))
            elif char == ")":
                self.dots_match_lines = dots.pop() if dots else self.dots_match_lines
                pieces.append(self._take(1))
            elif char in "|*+?":
                pieces.append(self._take(1))
            elif char == "{":
                pieces.append(self._take(self.pattern.find("}", self.place) + 1 - self.place))
            elif char in "^$":
                raise self._unknown("anchors within it")
            else:
                pieces.append(self._character())
        return "".join(pieces)

    def _take(self, count: int) -> str:
        if count < 1 or self.place + count > len(self.pattern):
            raise self._unknown("an unfinished expression")
        self.place += count
        return self.pattern[self.place - count : self.place]

    def _open_group(self, dots: list[bool]) -> str:
        self._take(1)
        if not self.pattern.startswith("?", self.place):
            return "("
        group = GROUP.match(self.pattern, self.place)
        if group is None or not FLAGS.fullmatch(group[1] or ""):
            raise self._unknown("a group of this kind")
        self.place = group.end()
        on, _, off = (group[1] or "").partition("-")
        self.dots_match_lines = (self.dots_match_lines or "s" in on) and "s" not in off
        if group[2] == ")":  # for the rest of the group around it
            dots.pop()
        return f"({group[0]}"

    def _character(self) -> str:
        """Rewrite what matches one character."""
        char = self.pattern[self.place]
        start = self.place
        if char == ".":
            self._take(1)
            if self.dots_match_lines:
                return self._class(r"[\x00-\u{10ffff}]", ESCAPED)
            return self._class(r"[^\n]", ESCAPED - {10})
        if char == "[":
            members = self._read_class()
            return self._class(self.pattern[start : self.place], members)
        if char != "\\":
            self._take(1)
            return self._literal(ord(char), char)
        members, code = self._read_escape()
        text = self.pattern[start : self.place]
        if code is None:
            return self._class(f"[{text}]", members)
        return self._literal(code, "/" if text == "\\/" else text)

    def _literal(self, code: int, text: str) -> str:
        return self._escapes({code}) if code in ESCAPED else text

    def _class(self, text: str, members: Members) -> str:
        if not members:
            return text
        return f"(?:[{text}--{OUTSIDE}]|{self._escapes(members)})"

    def _escapes(self, codes: Members | set[int]) -> str:
        self.has_escapes = True
        written = (SHORT.get(chr(code), f"\\u{code:04x}") for code in sorted(codes))
        return f"(?-i:{'|'.join(re.escape(escape) for escape in written)})"

    def _read_escape(self) -> tuple[Members, int | None]:
        """Return which escaped characters an escape matches, and the character if it is one."""
        self._take(1)
        if number := NUMBER.match(self.pattern, self.place):
            self.place = number.end()
            code = int(next(filter(None, number.groups())), 16)
            return frozenset({code} & ESCAPED), code
        if name := PROPERTY.match(self.pattern, self.place):
            self.place = name.end()
            return self._property(name[2] or name[3], is_negated=name[0][0] == "P" or bool(name[1])), None
        char = self._take(1)
        if char.lower() in PERL:
            members = PERL[char.lower()]
            return (ESCAPED - members if char.isupper() else members), None
        if char.isalnum() and char not in LETTERS:
            raise self._unknown(f"\\{char}")
        code = LETTERS.get(char, ord(char))
        return frozenset({code} & ESCAPED), code

    def _property(self, name: str, *, is_negated: bool) -> Members:
        if not HARMLESS_PROPERTY.fullmatch(name):
            raise self._unknown(f"\\p{{{name}}}")
        return ESCAPED if is_negated else frozenset()

    def _read_class(self) -> Members:
        """Return which escaped characters a class matches."""
        self._take(1)
        is_negated = self.pattern.startswith("^", self.place)
        self.place += is_negated
        found: Members | None = None
        operator, members = "", frozenset[int]()
        is_first = True
        while not self.pattern.startswith("]", self.place) or is_first:
            if self.pattern.startswith(OPERATORS, self.place) and not is_first:
                found, members = _combined(found, operator, members), frozenset()
                operator = self._take(2)
            else:
                members |= self._read_member()
            is_first = False
        self._take(1)
        members = _combined(found, operator, members)
        return ESCAPED - members if is_negated else members

    def _read_member(self) -> Members:
        if self.pattern.startswith("[:", self.place):
            name = re.compile(r"\[:(\^?)(\w+):\]").match(self.pattern, self.place)
            if name is None or name[2] not in POSIX:
                raise self._unknown("a class of this name")
            self.place = name.end()
            return ESCAPED - POSIX[name[2]] if name[1] else POSIX[name[2]]
        if self.pattern.startswith("[", self.place):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self._unknown("too many classes within each other")
            members = self._read_class()
            self.depth -= 1
            return members
        members, first = self._read_bound()
        is_range = self.pattern.startswith("-", self.place) and self.pattern[self.place + 1 : self.place + 2] not in (
            "]",
            "-",
        )
        if first is None or not is_range:
            return members
        self._take(1)
        _, last = self._read_bound()
        if last is None:
            raise self._unknown("a range of this kind")
        return frozenset(code for code in ESCAPED if first <= code <= last)

    def _read_bound(self) -> tuple[Members, int | None]:
        if self.pattern.startswith("\\", self.place):
            return self._read_escape()
        code = ord(self._take(1))
        return frozenset({code} & ESCAPED), code

    def _unknown(self, what: str) -> ClientError:
        return ClientError(f"the expression {self.pattern[:64]!r} cannot be used: it has {what}", param="grammar")


def _combined(found: Members | None, operator: str, members: Members) -> Members:
    if found is None:
        return members
    return {"&&": found & members, "--": found - members, "~~": found ^ members}[operator]
