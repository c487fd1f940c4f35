"""A grammar in Lark's notation as one regular expression, where none of its rules needs itself.

The text around a grammar may have a form of its own, as that of a JSON string; an expression can be rewritten to it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from aserve.errors import ClientError
from aserve.structured.json_text import ESCAPED, within_json_string

MAX_DEPTH = 100  # of groups, and of rules that need each other
MAX_REGULAR_CHARS = 1 << 16
COMMON = {  # the terminals of %import common
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9A-Fa-f]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+)?)",
    "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][A-Za-z0-9_]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+",
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip
TOKENS = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\n|(?://|\#)[^\n]*)+)|(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[imslux]*)
    |(?P<word>[?!]?_?[A-Za-z][A-Za-z0-9_]*(?:\.-?[0-9]+(?=\s*:))?)|(?P<directive>%[a-z]+)
    |(?P<repeat>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)|(?P<sign>\.\.|->|[:|()\[\]?*+,.])""",
    re.VERBOSE,
)


class NotRegularError(Exception):
    """The grammar needs a rule within itself, or would be too long as an expression."""


@dataclass
class Grammar:
    """Definitions by name, each as its tokens, and what may stand between any two terminals."""

    definitions: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[list[str]] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, definition: str) -> "Grammar":
        """Return the grammar that ``definition`` says."""
        grammar = cls()
        for statement in _statements(_tokens(definition)):
            grammar._note(statement)
        if "start" not in grammar.definitions:
            raise ClientError("the grammar has no rule 'start'", param="grammar")
        return grammar

    def expression(self, name: str) -> str:
        """Return the expression for a rule or terminal; between the terminals of a rule, what is ignored may stand."""
        if name in self._known:
            return self._known[name]
        if name in self._open or len(self._open) > MAX_DEPTH:
            raise NotRegularError
        if name not in self.definitions:
            raise ClientError(f"the grammar has no {name[:64]!r}", param="grammar")
        self._open.append(name)
        skipped = "" if name.isupper() or not self.ignored else self.skipped()
        text = _Alternatives(self.definitions[name], self.expression, skipped).read_all()
        if name == "start":
            text = skipped + text
        self._open.pop()
        if len(text) > MAX_REGULAR_CHARS:
            raise NotRegularError
        self._known[name] = text
        return text

    def skipped(self) -> str:
        """Return the expression for what may stand between terminals."""
        texts = [_Alternatives(tokens, self.expression, "").read_all() for tokens in self.ignored]
        return f"(?:{'|'.join(texts)})*"

    def without_escapes(self) -> str | None:
        """Return the grammar in Lark's notation if nothing in its texts is escaped in JSON, else None.

        Where white space is ignored that would have to be, only spaces are.
        """
        if any(map(_has_escapes, self.definitions.values())) and not self._only_ignores_escapes():
            return None
        lines = [f"{name}: {' '.join(tokens)}" for name, tokens in self.definitions.items() if not _has_escapes(tokens)]
        for tokens in self.ignored:
            text = _Alternatives(tokens, self.expression, "").read_all()
            if not within_json_string(text)[1]:
                lines.append(f"%ignore {' '.join(tokens)}")
            elif _is_space(text):
                lines.append("%ignore / +/")
        return "\n".join([*lines, ""])

    def _only_ignores_escapes(self) -> bool:
        """Whether every definition with something to be escaped is ignored, and used for nothing else."""
        ignored = {token for tokens in self.ignored for token in tokens}
        used = {token for tokens in self.definitions.values() for token in tokens}
        return all(name in ignored - used for name, tokens in self.definitions.items() if _has_escapes(tokens))

    def _note(self, tokens: list[str]) -> None:
        if tokens[0] == "%ignore":
            self.ignored.append(tokens[1:])
        elif tokens[0] == "%import":
            self._import(tokens[1:])
        elif tokens[0].startswith("%") or len(tokens) < 2 or tokens[1] != ":":
            raise ClientError(f"the grammar cannot be used: {' '.join(tokens)[:64]!r}", param="grammar")
        else:
            name = tokens[0].lstrip("?!").partition(".")[0]
            if name in self.definitions:
                raise ClientError(f"the grammar defines {name[:64]!r} twice", param="grammar")
            self.definitions[name] = tokens[2:]

    def _import(self, tokens: list[str]) -> None:
        words = [token for token in tokens if token not in (".", ",", "(", ")")]
        names, alias = words[1:], None
        if words[2:3] == ["->"] and len(words) == 4:
            names, alias = words[1:2], words[3]
        if words[:1] != ["common"] or not names or not set(names) <= COMMON.keys():
            raise ClientError(f"the grammar cannot import {' '.join(words)[:64]!r}", param="grammar")
        for name in names:
            self.definitions[alias or name] = [f"/{COMMON[name]}/"]


@dataclass
class _Alternatives:
    """Reads the right side of one definition; ``skipped`` may follow each of its terminals."""

    tokens: list[str]
    expression_of: Callable[[str], str]
    skipped: str
    place: int = 0
    depth: int = 0

    def read_all(self) -> str:
        text = self._read()
        if self.place < len(self.tokens):
            raise self._unexpected()
        return text

    def _read(self) -> str:
        choices = [""]
        while self.place < len(self.tokens) and (token := self.tokens[self.place]) not in (")", "]"):
            if token == "|":
                choices.append("")
                self.place += 1
            elif token == "->":
                self.place += 2
            else:
                choices[-1] += self._read_repeated()
        return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"

    def _read_repeated(self) -> str:
        text = self._read_one()
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if token in ("?", "*", "+"):
                text = f"(?:{text}){token}"
            elif token.startswith("~"):
                fewest, _, most = token[1:].replace(" ", "").partition("..")
                text = f"(?:{text}){{{fewest}}}" if not most else f"(?:{text}){{{fewest},{most}}}"
            else:
                break
            self.place += 1
        return text

    def _read_one(self) -> str:
        token = self.tokens[self.place]
        self.place += 1
        if token in ("(", "["):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise ClientError("the grammar is nested too deeply", param="grammar")
            text = self._read()
            self.depth -= 1
            if self.tokens[self.place : self.place + 1] != [")" if token == "(" else "]"]:
                raise self._unexpected()
            self.place += 1
            return f"(?:{text}){'?' if token == '[' else ''}"
        if token.startswith('"'):
            return self._read_string(token) + self.skipped
        if token.startswith("/"):
            return read_regex(token) + self.skipped
        if not re.match(r"_?[A-Za-z]", token):
            self.place -= 1
            raise self._unexpected()
        return f"(?:{self.expression_of(token)})" + (self.skipped if token.isupper() else "")

    def _read_string(self, token: str) -> str:
        text = read_string(token)
        if self.tokens[self.place : self.place + 1] == [".."]:
            last = read_string(self.tokens[self.place + 1]) if self.place + 1 < len(self.tokens) else ""
            self.place += 2
            if len(text) != 1 or len(last) != 1:
                raise self._unexpected()
            return f"[\\u{{{ord(text):x}}}-\\u{{{ord(last):x}}}]"
        escaped = (
            re.escape(text).replace("\\\n", "\\n").replace("\\ ", " ").replace("\\\t", "\\t").replace("\\\r", "\\r")
        )
        return f"(?i:{escaped})" if token.endswith("i") else f"(?:{escaped})"

    def _unexpected(self) -> ClientError:
        shown = " ".join(self.tokens[max(0, self.place - 3) : self.place + 1])
        return ClientError(f"the grammar cannot be used near {shown[-64:]!r}", param="grammar")


def _has_escapes(tokens: list[str]) -> bool:
    """Whether something that ``tokens`` say themselves is escaped in JSON."""
    for place, token in enumerate(tokens):
        if token.startswith('"'):
            last = read_string(tokens[place + 2]) if tokens[place + 1 : place + 2] == [".."] else ""
            text = read_string(token)
            codes = set(range(ord(text[0]), ord(last[0]) + 1)) if last and text else set(map(ord, text))
            if codes & ESCAPED:
                return True
        elif token.startswith("/") and within_json_string(read_regex(token))[1]:
            return True
    return False


def _is_space(text: str) -> bool:
    """Whether the expression ``text`` matches a space, as far as Python understands it."""
    try:
        return re.fullmatch(text, " ") is not None
    except re.error:
        return False


def read_string(token: str) -> str:
    """Return what a string in a grammar says."""
    try:
        text = str(json.loads(token.removesuffix("i") if not token.endswith('"') else token))
        text.encode()  # a lone surrogate is no text
        return text
    except ValueError:
        raise ClientError(f"the grammar has a string that cannot be read: {token[:64]}", param="grammar") from None


def read_regex(token: str) -> str:
    """Return the expression between slashes, with its flags."""
    pattern, _, flags = token[1:].rpartition("/")
    used = "".join(sorted(set(flags) & set("is")))
    if set(flags) - set("isu"):
        raise ClientError(
            f"the grammar has an expression with other flags than i, s and u: {token[:64]}", param="grammar"
        )
    return f"(?{used}:{pattern})" if used else f"(?:{pattern})"


def _tokens(definition: str) -> list[str]:
    found, place = [], 0
    while place < len(definition):
        token = TOKENS.match(definition, place)
        if token is None:
            raise ClientError(f"the grammar cannot be used near {definition[place : place + 32]!r}", param="grammar")
        place = token.end()
        if token.lastgroup != "space":
            found.append(token[0])
    return found


def _statements(tokens: list[str]) -> list[list[str]]:
    """Return the tokens of each statement; a line that begins with a sign goes on with the one before."""
    statements: list[list[str]] = []
    is_new = True
    depth = 0
    for token in tokens:
        if token == "\n":
            is_new = is_new or not depth
            continue
        depth += (token in ("(", "[")) - (token in (")", "]"))
        if is_new and (token not in ("|", "->", ")", "]", "?", "*", "+") or not statements):
            statements.append([])
        statements[-1].append(token)
        is_new = False
    return statements
