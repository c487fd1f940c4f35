"""The transform of keys keeps attention and makes what rounding does to it smaller, on keys as uneven as real ones."""

import dataclasses

import pytest
import torch
from torch import Tensor

from aserve.attention.balance import balance_keys
from aserve.attention.base import AttentionSpec
from aserve.attention.rotation import spread
from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import dequantise, quantise, quantise_in_halves

SPEC = AttentionSpec(layer_idx=0, num_heads=6, num_kv_heads=2, head_dim=64, scale=0.05)
LARGEST = 6 * 448


def draw(num_tokens: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys whose channels differ in size by a factor of ten, the keys far from zero; and values."""
    generator = torch.Generator().manual_seed(5)
    sizes = 10 ** torch.rand(2, 64, generator=generator)
    queries = torch.randn(num_tokens, 6, 64, generator=generator) * sizes[0] / 4
    keys = (torch.randn(num_tokens, 2, 64, generator=generator) + 2) * sizes[1] / 4
    return queries, keys, torch.randn(num_tokens, 2, 64, generator=generator)


def shares(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the softmax of all scores, without a mask, in float64 [K, G, T, T]."""
    grouped = queries.double().view(len(queries), 2, 3, 64)
    return torch.softmax(torch.einsum("tkgd,skd->kgts", grouped, keys.double()) * SPEC.scale, -1)


def store(keys: Tensor) -> Tensor:
    """Return what pages of nvfp4 keep of keys."""
    scale = 2 * keys.abs().max().item() / LARGEST
    return dequantise(*quantise(keys, scale)) * scale


def store_transformed(keys: Tensor, transform: KeyTransform) -> Tensor:
    """Return what pages of nvfp4 keep of keys that go through ``transform``."""
    stored = transform.transform_keys(keys)
    if transform.feedback is None:
        return store(stored)
    scale = 2 * stored.abs().max().item() / LARGEST
    packed, _ = quantise_in_halves(stored / scale, torch.zeros_like(keys), transform.feedback)
    return dequantise(*packed) * scale


@pytest.mark.parametrize("feeds_back", [False, True])
def test_attention_stays(feeds_back: bool) -> None:
    queries, keys, values = draw()
    transform = balance_keys(queries, keys, values, SPEC, feeds_back=feeds_back)
    assert (transform.feedback is not None) == feeds_back
    found = shares(transform.transform_queries(queries), transform.transform_keys(keys))
    torch.testing.assert_close(found, shares(queries, keys), rtol=0, atol=1e-5)


@pytest.mark.parametrize("feeds_back", [False, True])
def test_scores_themselves_stay_where_sinks_or_caps_see_them(feeds_back: bool) -> None:
    queries, keys, values = draw()
    for changes in ({"sinks": torch.zeros(6)}, {"softcap": 30.0}):
        transform = balance_keys(queries, keys, values, dataclasses.replace(SPEC, **changes), feeds_back=feeds_back)
        assert not transform.offset.any()
        found = transform.transform_queries(queries)[:, :3] @ transform.transform_keys(keys)[:, 0].T
        expected = queries[:, :3] @ keys[:, 0].T
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("feeds_back", "times_less"), [(False, 4), (True, 8)])
def test_rounded_keys_move_attention_less(feeds_back: bool, times_less: int) -> None:
    queries, keys, values = draw(400)
    transform = balance_keys(queries[:200], keys[:200], values[:200], SPEC, feeds_back=feeds_back)
    queries, keys = queries[200:], keys[200:]
    exact = shares(queries, keys)
    plain = (shares(queries, store(keys)) - exact).square().sum()
    found = shares(transform.transform_queries(queries), store_transformed(keys, transform))
    assert (found - exact).square().sum() < plain / times_less


@pytest.mark.parametrize("feeds_back", [False, True])
def test_heads_without_keys_or_queries_have_a_transform(feeds_back: bool) -> None:
    queries, keys, values = draw()
    for changed in ((torch.zeros_like(queries), keys), (queries, torch.zeros_like(keys))):
        transform = balance_keys(*changed, values, SPEC, feeds_back=feeds_back)
        matrices = (transform.key, transform.query, transform.offset, transform.feedback)
        assert all(bool(x.isfinite().all()) for x in matrices if x is not None)


@pytest.mark.parametrize(("size", "largest"), [(64, 1.0), (128, 1.0), (96, 1.37), (80, 1.41)])
def test_the_spread_is_an_even_rotation(size: int, largest: float) -> None:
    rotation = spread(size)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert rotation.abs().max() < (largest + 1e-9) / size**0.5
