"""Closed forms for bases and merges, then a split of real attention."""

import math

import pytest
import torch
from doubles_attention import dense_attention, make_case, make_spec, torch_backend

from aserve.attention.merge import convert_lse, merge_stacked


def test_conversion_of_bases() -> None:
    lse = torch.tensor([0.0, math.log(8.0), -math.inf])
    assert convert_lse(lse, "e", "2").tolist() == pytest.approx([0.0, 3.0, -math.inf])
    assert convert_lse(torch.tensor([3.0]), "2", "e").item() == pytest.approx(math.log(8.0))
    assert convert_lse(lse, "e", "e") is lse


def test_merge_of_two_sums() -> None:
    """Sums 8 and 2 with outputs 1 and -1 give (8 - 2) / 10."""
    outputs = torch.stack((torch.ones(1, 1, 4), -torch.ones(1, 1, 4)))
    output, lse = merge_stacked(outputs, torch.tensor([8.0, 2.0]).log().view(2, 1, 1))
    torch.testing.assert_close(output, torch.full((1, 1, 4), 0.6))
    assert lse.item() == pytest.approx(math.log(10))


def test_a_side_without_keys_adds_nothing() -> None:
    outputs = torch.tensor([3.0, 7.0]).view(2, 1, 1, 1)
    output, lse = merge_stacked(outputs, torch.tensor([1.5, -math.inf]).view(2, 1, 1))
    assert (output.item(), lse.item()) == (3.0, 1.5)
    output, lse = merge_stacked(outputs, torch.full((2, 1, 1), -math.inf))
    assert (output.item(), lse.item()) == (0.0, -math.inf)


def test_any_number_of_sides_merge_and_what_an_empty_one_holds_does_not_matter() -> None:
    """Sums 1, 2, 5 and none with outputs 8, 4, 1 and NaN give (8 + 8 + 5) / 8."""
    outputs = torch.tensor([8.0, 4.0, 1.0, math.nan]).view(4, 1, 1, 1)
    lses = torch.tensor([0.0, math.log(2.0), math.log(5.0), -math.inf]).view(4, 1, 1)
    output, lse = merge_stacked(outputs, lses)
    assert output.item() == pytest.approx(21 / 8)
    assert lse.item() == pytest.approx(math.log(8.0))


def test_3072_and_64_keys_merge_to_all() -> None:
    spec = make_spec(2, 1, 64)
    whole = make_case(spec, [1], [3136], 1)
    backend = torch_backend()
    outputs, lses = [], []
    for seen in (slice(0, 3072), slice(3072, 3136)):
        part = make_case(spec, [1], [seen.stop - seen.start], 1)
        pages = part.batch.page_table[0].long()
        part.layer_kv.key[pages] = whole.keys[0][seen].view(-1, 16, 1, 64)
        part.layer_kv.value[pages] = whole.values[0][seen].view(-1, 16, 1, 64)
        output, lse = backend.forward(whole.q, part.layer_kv, backend.plan(part.batch), spec, return_lse=True)
        assert lse is not None
        outputs.append(output)
        lses.append(convert_lse(lse, backend.lse_base, "e"))
    output, lse = merge_stacked(torch.stack(outputs), torch.stack(lses))
    expected, expected_lse = dense_attention(whole, spec)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
