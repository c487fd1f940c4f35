"""The shapes of JSON answers, declared for the OpenAPI document; the answers themselves are built as bytes.

A field that is not always there has the default UNSET. No other fields are sent: tests hold answers to these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Answer(Struct, forbid_unknown_fields=True, kw_only=True):
    """An object with these fields and no others."""


class ErrorBody(Answer):
    """What went wrong: for people, for programs, and with which field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The answer to a request that failed."""

    error: ErrorBody


class Typed(Struct):
    """An object of the named type; its other fields depend on it."""

    type: str


class StatusAnswer(Answer):
    """How the server is."""

    status: Literal["ok", "failed", "stuck", "ready"]


class VersionAnswer(Answer):
    """Which aserve this is."""

    version: str


class Model(Answer):
    """A served model; ``max_model_len`` is its context in tokens, ``created`` in Unix seconds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """The served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """What a prompt becomes; ``token_strs`` only if asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedText(Answer):
    """The text of token ids."""

    prompt: str
