"""The nvfp4 format in torch, against its table of elements and the search for the nearest one."""

import dataclasses

import pytest
import torch
from doubles_attention import E2M1 as ELEMENTS
from torch import Tensor

from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import BlockScales, dequantise, quantise
from aserve.kernels.operators import KVTarget, Operators


def nearest(x: Tensor) -> Tensor:
    """Return the nearest elements by search; of two as near, the one whose last bit is 0."""
    distances = (x.double().abs().unsqueeze(-1) - ELEMENTS[:8].double()).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    evenness = torch.tensor([1, 0] * 4)
    codes = (is_nearest * (1 + evenness)).argmax(-1)
    return torch.where(x < 0, -ELEMENTS[codes], ELEMENTS[codes])


def read(packed: Tensor, block_scales: Tensor) -> Tensor:
    """Return what bytes and scales stand for by the table, in float64: two elements a byte, the low half first."""
    codes = torch.stack((packed.long() & 15, packed.long() >> 4), dim=-1).flatten(-2)
    return ELEMENTS.double()[codes] * block_scales.double().repeat_interleave(16, dim=-1)


def test_every_byte_is_read_by_the_table() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    block_scales = torch.tensor([2.0**-9, 0.4375, 1.0, 448.0] * 8).view(4, 8).to(torch.float8_e4m3fn)
    values = dequantise(packed, block_scales)
    assert values.dtype == torch.float32
    assert torch.equal(values.double(), read(packed, block_scales))


def test_elements_are_the_nearest_ties_to_even() -> None:
    """A first element of 6 and many of 4 leave no block a better scale than 1."""
    steps = torch.cat(
        (torch.arange(-24, 25) / 4, torch.tensor([0.2499, 0.2501, 2.4999, 2.5001, 4.9999, 5.0001, -3.4999]))
    )
    blocks = torch.full((len(steps), 16), 4.0)
    blocks[:, 0] = 6
    blocks[:, 1] = steps
    packed, block_scales = quantise(blocks, 1.0)
    assert (packed.shape, packed.dtype) == ((len(steps), 8), torch.uint8)
    assert torch.equal(block_scales.float(), torch.ones(len(steps), 1))
    assert torch.equal(read(packed, block_scales), nearest(blocks).double())


@pytest.mark.parametrize("scale", [0.25, 1.0, torch.tensor([[0.5], [2.0]])])
def test_blocks_have_the_best_of_four_scales(scale: float | Tensor) -> None:
    """The e4m3 number nearest to what makes the largest element 6, the one below, and the fourth and fifth above."""
    torch.manual_seed(0)
    x = torch.randn(5, 2, 64) * torch.logspace(-2, 1, 4).repeat_interleave(16)
    packed, block_scales = quantise(x, scale)
    wanted = (x.double() / scale).view(5, 2, 4, 16)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    usual = (numbers - wanted.abs().amax(-1, keepdim=True) / 6).abs().argmin(-1)
    tried = numbers[usual.unsqueeze(-1) + torch.tensor([-1, 0, 4, 5])].unsqueeze(-1)  # [..., 4, 1]
    rounded = nearest((wanted.unsqueeze(-2) / tried).float()).double() * tried
    errors = (rounded - wanted.unsqueeze(-2)).square().sum(-1)
    found = read(packed, block_scales).view(wanted.shape)
    torch.testing.assert_close((found - wanted).square().sum(-1), errors.amin(-1), rtol=1e-5, atol=0)
    assert len(errors.argmin(-1).unique()) == 4, "each is the best of some blocks"


def test_zeros_tiny_and_huge_values() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = 1e-4, -1e6  # below half the smallest block scale, above the largest
    packed, block_scales = quantise(x, 1.0)
    assert block_scales.float().flatten().tolist() == [0.0, 0.0, 448.0]
    values = dequantise(packed, block_scales)
    assert not values[:2].any()
    assert values[2, 5] == -6 * 448
    assert not values[2, :5].any()


@pytest.mark.parametrize("is_head_major", [False, True])
def test_keys_and_values_are_stored_where_they_belong(is_head_major: bool) -> None:
    torch.manual_seed(0)

    def pages(width: int, dtype: torch.dtype) -> Tensor:
        inner = (2, 4) if is_head_major else (4, 2)
        full = torch.full((3, *inner, width), 7).to(dtype)
        return full.transpose(1, 2) if is_head_major else full

    blocks = BlockScales(pages(2, torch.float8_e4m3fn), pages(2, torch.float8_e4m3fn))
    slots = torch.tensor([11, 0, 6])
    scales = (0.25, torch.tensor([0.5, 2.0]))
    target = KVTarget(pages(16, torch.uint8), pages(16, torch.uint8), slots, *scales, blocks)
    k, v = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    Operators().store_kv(k, v, target)
    for stored, block_scales, new, scale in (
        (target.key, blocks.key, k, torch.tensor(0.25)),
        (target.value, blocks.value, v, torch.tensor([[0.5], [2.0]])),
    ):
        found = (read(stored, block_scales).flatten(0, 1)[slots]) * scale
        assert (found - new).abs().max() < 0.25 * new.abs().max()
        untouched = [slot for slot in range(12) if slot not in slots]
        assert (stored.flatten(0, 1)[untouched] == 7).all()


def test_second_halves_of_keys_are_stored_with_what_is_fed_back() -> None:
    """First halves and values are those of a store without a feedback; second halves answer the errors of the first."""
    torch.manual_seed(0)
    feedback = torch.randn(2, 32, 32)
    transform = KeyTransform(torch.eye(64).expand(2, -1, -1), torch.eye(64).expand(2, -1, -1), torch.zeros(2, 64))
    k, v, slots = torch.randn(5, 2, 64), torch.randn(5, 2, 64), torch.tensor([7, 2, 3, 0, 5])

    def store(feedback: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor]:
        blocks = BlockScales(*(torch.zeros(2, 4, 2, 4, dtype=torch.float8_e4m3fn) for _ in range(2)))
        pages = [torch.zeros(2, 4, 2, 32, dtype=torch.uint8) for _ in range(2)]
        target = KVTarget(*pages, slots, 0.25, 0.5, blocks, dataclasses.replace(transform, feedback=feedback))
        Operators().store_kv(keys, v, target)
        key, value = (read(*both).flatten(0, 1)[slots] for both in zip(pages, (blocks.key, blocks.value), strict=True))
        return 0.25 * key, 0.5 * value

    plain_key, plain_value = store(None, k)
    key, value = store(feedback, k)
    assert torch.equal(value, plain_value)
    assert torch.equal(key[..., :32], plain_key[..., :32])
    errors = key[..., :32] - k[..., :32].double()
    fed = k[..., 32:].double() + torch.einsum("tkd,kde->tke", errors, feedback.double())
    expected, _ = store(None, torch.cat((k[..., :32], fed.float()), dim=-1))
    torch.testing.assert_close(key, expected)
