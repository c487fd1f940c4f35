"""Rotary position embedding: its parameters and the table of cosines and sines for every position.

The table depends on the position alone, never on the batch or on the length of a sequence, so keys in
the cache stay valid whoever reads them. ``dynamic`` scaling is where that is a choice: its base grows with
the sequence. Position p takes the base of the sequence that ends at p. This equals transformers up to the
original context length, and beyond it for decoding token by token; a prompt that is longer than the original
context in one piece is rotated by transformers with the base of its last token throughout.

``longrope`` has two sets of factors, for sequences within the original context and beyond. One set serves all
sequences of an engine: the long one if any of them may exceed the original context, that is, if the table has more
positions. transformers chooses anew for each forward instead, which would mix both in the cache of a sequence that
grows over the border.

Kernels rotate whole heads, in pairs (i, i + head_dim / 2). Where only the first channels of a head are rotated
(``partial_rotary_factor``), loading reorders the rows of the query and key projections (``pair_halves``), and the
table says angle 0 for the others.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.errors import ConfigError
from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotation; which ones count depends on ``scaling``.

    ``original_context_len`` is the context in tokens before scaling; ``attention_factor`` multiplies cosines and sines.
    """

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_range_truncated: bool = True
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0  # of a head's channels, the first ones
    short_factors: tuple[float, ...] = ()  # divisors of the frequencies, one each
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "attention_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rope {name} must be positive, got {getattr(self, name)}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, got {self.partial_rotary_factor}")

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def takes_long_factors(self, max_positions: int) -> bool:
        """Whether longrope's long factors serve an engine whose sequences have at most ``max_positions`` tokens."""
        return max_positions > self.original_context_len

    def check(self, head_dim: int) -> None:
        """Raise ConfigError unless heads of ``head_dim`` channels can be rotated so."""
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim % 2 or rotary_dim == 0:
            raise ConfigError(
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {rotary_dim} of {head_dim} channels, "
                "but they come in pairs"
            )
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if self.scaling == "longrope" and (len(factors) != rotary_dim // 2 or min(factors) <= 0):
                raise ConfigError(f"rope {name} must be {rotary_dim // 2} positive numbers, got {list(factors)}")


class RotaryTable(WeightedLayer):
    """The table [max positions, head_dim] float32, cosines in the first half of a row.

    A GGUF file may bring one divisor per frequency (``rope_freqs``, how it stores llama3 scaling).
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, weights: WeightFormat) -> None:
        super().__init__("rope_freqs", weights)
        self.config = config
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.cos_sin = self._build(None)

    def slots(self) -> dict[str, WeightSlot]:
        num_frequencies = self.config.rotary_dim(self.head_dim) // 2
        return {f"{self.name}.weight": WeightSlot((num_frequencies,), self._write, is_optional=True)}

    def fit(self, max_positions: int) -> None:
        """Choose longrope's factors for sequences of at most ``max_positions``; other tables stay as they are."""
        if self.config.scaling == "longrope":
            self.max_positions = max_positions
            self.cos_sin = self._build(self.tensors.get("divisors"))

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        if "divisors" in tensors:
            self.cos_sin = self._build(tensors["divisors"])

    def _write(self, divisors: Tensor) -> None:
        self.tensors["divisors"] = divisors.to(self.weights.device, torch.float32, copy=True)
        self.cos_sin = self._build(divisors)

    def _build(self, divisors: Tensor | None) -> Tensor:
        return build_cos_sin(self.config, self.head_dim, self.max_positions, divisors).to(self.weights.device)


def build_cos_sin(config: RopeConfig, head_dim: int, max_positions: int, divisors: Tensor | None = None) -> Tensor:
    """Return [max_positions, head_dim] float32 on the CPU, computed in float32 as transformers does."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    rotary_dim = config.rotary_dim(head_dim)  # R
    frequencies = _scaled_frequencies(config, rotary_dim, positions)  # [R/2], or [positions, R/2]
    if divisors is not None:
        frequencies = frequencies / divisors.cpu().float()
    angles = positions.unsqueeze(1) * frequencies
    num_kept = (head_dim - rotary_dim) // 2  # pairs that are not rotated
    cos = F.pad(angles.cos() * config.attention_factor, (0, num_kept), value=1.0)
    sin = F.pad(angles.sin() * config.attention_factor, (0, num_kept))
    return torch.cat((cos, sin), dim=1)


def pair_halves(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder rows [heads * head_dim, ...] of heads whose pairs are (i, i + rotary_dim / 2) to (i, i + head_dim / 2).

    The channels behind ``rotary_dim`` become pairs as well.
    """
    rotated, kept = torch.arange(rotary_dim).chunk(2), torch.arange(rotary_dim, head_dim).chunk(2)
    order = torch.cat((rotated[0], kept[0], rotated[1], kept[1])).to(rows.device)
    return rows.view(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _scaled_frequencies(config: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    powers = config.theta**exponents
    frequencies = 1.0 / powers
    match config.scaling:
        case "none":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "dynamic":
            return 1.0 / _dynamic_bases(config, rotary_dim, positions).unsqueeze(1) ** exponents
        case "llama3":
            return _llama3_frequencies(config, frequencies)
        case "yarn":
            return _yarn_frequencies(config, frequencies)
        case "longrope":
            factors = config.long_factors if config.takes_long_factors(len(positions)) else config.short_factors
            return 1.0 / (torch.tensor(factors) * powers)


def _dynamic_bases(config: RopeConfig, rotary_dim: int, positions: Tensor) -> Tensor:
    """NTK-aware bases [positions], each that of the sequence ending there (posts by bloc97 and emozilla, 2023)."""
    lengths = (positions.double() + 1).clamp(min=config.original_context_len)
    growth = config.factor * lengths / config.original_context_len - (config.factor - 1)
    return (config.theta * growth ** (rotary_dim / (rotary_dim - 2))).float()


def _llama3_frequencies(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, a linear blend between (Llama 3.1's release)."""
    turns = config.original_context_len * frequencies / (2 * math.pi)  # full turns within the original context
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn_frequencies(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Blend by dimension between interpolated and original frequencies (YaRN, Peng et al. 2023, section 3.2)."""
    num_frequencies = len(frequencies)
    low, high = (_yarn_dimension(config, turns, 2 * num_frequencies) for turns in (config.beta_fast, config.beta_slow))
    if config.is_range_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_frequencies - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(num_frequencies, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn_dimension(config: RopeConfig, turns: float, head_dim: int) -> float:
    """The index of the frequency that makes ``turns`` full turns within the original context."""
    return head_dim * math.log(config.original_context_len / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
