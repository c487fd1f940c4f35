"""What loading needs of a checkpoint, whatever its format: its config and its tensors, one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from aserve.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet.

    ``name`` is what the model's slots call it (transformers' spelling), ``label`` what its file calls it.
    ``read`` raises WeightsError if the bytes are no usable tensor; the result may be a view of the mapped file.
    """

    name: str
    label: str
    file: Path
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class Checkpoint(ABC):
    """The files of one model. Opening one raises WeightsError or ConfigError if they do not fit together."""

    path: Path  # for messages: the file or folder as a whole
    config: DecoderConfig

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files that hold weights and config."""

    @abstractmethod
    def tensors(self) -> Iterator[StoredTensor]:
        """Walk through the checkpoint's own tensors in file order."""
