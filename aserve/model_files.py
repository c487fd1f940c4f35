"""Where a model's files are and what kind they are; knows no tensors and no tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: a ``.gguf`` file, or a folder with config.json and ``*.safetensors``."""

    path: Path
    format: Literal["gguf", "safetensors"]
    name: str  # what clients call it unless --served-model-name says otherwise
    is_demo: bool = False
