"""What rank 0 and the others say to each other, and its form on the wire; nothing that is received is executed."""

from pathlib import Path
from typing import Any

from msgspec import Struct, msgpack

from aserve.config import EngineConfig
from aserve.model_files import ModelFiles
from aserve.request import GrammarSpec
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan


class Setup(Struct, tag=True, frozen=True):
    """Rank 0, first of all: who the receiver is and what it loads. Settings that a machine decides are decided."""

    rank: int
    size: int
    store: str  # path of the file where the group meets
    config: EngineConfig
    files: ModelFiles
    eos_token_ids: list[int]
    has_grammars: bool


class WarmUp(Struct, tag=True, frozen=True):
    """Rank 0: run the warm-up steps, as I do now."""


class Execute(Struct, tag=True, frozen=True):
    """Rank 0: launch this step, as I do now."""

    plan: StepPlan


class PrepareGrammar(Struct, tag=True, frozen=True):
    """Rank 0: compile this, beside the steps; a request will come with it."""

    grammar: GrammarSpec


class Close(Struct, tag=True, frozen=True):
    """Rank 0: finish what was launched and end."""


class Started(Struct, tag=True, frozen=True):
    """Another rank: about to join the group."""


class Ready(Struct, tag=True, frozen=True):
    """Another rank: loaded, with these limits."""

    limits: Limits


class Prepared(Struct, tag=True, frozen=True):
    """Another rank: the grammar is compiled, or refused."""


class Executed(Struct, tag=True, frozen=True):
    """Another rank: the next step is done; the hash of it and of all before it."""

    digest: bytes


class Failed(Struct, tag=True, frozen=True):
    """Another rank, last of all: what ended it."""

    message: str


Order = Setup | WarmUp | Execute | PrepareGrammar | Close
Milestone = Started | Ready | Prepared
Report = Milestone | Executed | Failed


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is no part of a message")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} is no part of a message")


_ENCODER = msgpack.Encoder(enc_hook=_encode_path)
_ORDERS: msgpack.Decoder[Order] = msgpack.Decoder(Order, dec_hook=_decode_path)
_REPORTS: msgpack.Decoder[Report] = msgpack.Decoder(Report)


def encode(message: Any) -> bytes:
    """Return the bytes of a message, or of other plain data; the same for what was decoded from them."""
    return _ENCODER.encode(message)


def decode_order(data: bytes) -> Order:
    """Return what rank 0 said. Raises msgspec.DecodeError for anything else."""
    return _ORDERS.decode(data)


def decode_report(data: bytes) -> Report:
    """Return what another rank said. Raises msgspec.DecodeError for anything else."""
    return _REPORTS.decode(data)
