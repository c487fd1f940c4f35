"""The demo model predicts a text as well with int8 weights: perplexity within 1 % over 36,000 tokens, 2 % over 500."""

import math

import pytest

from aserve.bench.perplexity import DEFAULT_TEXT, measure_loss
from aserve.model_files import ModelFiles
from aserve.tokenizer.load import load_tokenizer

MAX_CHANGES = {"fp8": 0.01, "nvfp4": 0.03}  # of perplexity, see docs/measurements.md


def test_int8_on_the_first_windows_raises_perplexity_by_less_than_two_percent(demo_files: ModelFiles) -> None:
    text = DEFAULT_TEXT.read_text(encoding="utf-8")[:4096]
    token_ids = load_tokenizer(demo_files).encode(text, add_special_tokens=False)[:512]
    assert len(token_ids) == 512
    plain, num_tokens = measure_loss(demo_files, "none", token_ids, 128)
    quantised, _ = measure_loss(demo_files, "int8_cpu", token_ids, 128)
    assert num_tokens == 4 * 127
    assert 1 < math.exp(plain) < 50
    assert abs(quantised - plain) < math.log(1.02)


@pytest.mark.timeout(300)
def test_keys_and_values_of_few_bits_predict_as_well_or_nearly_so(demo_files: ModelFiles) -> None:
    """On a piece of text so short, within twice of what they cost on a long one; a lost scale costs all."""
    text = DEFAULT_TEXT.read_text(encoding="utf-8")[:2048]
    token_ids = load_tokenizer(demo_files).encode(text, add_special_tokens=False)[:256]
    losses = {name: measure_loss(demo_files, "int8_cpu", token_ids, 256, name)[0] for name in ("auto", *MAX_CHANGES)}
    for name, most in MAX_CHANGES.items():
        assert losses[name] != losses["auto"]
        assert losses[name] - losses["auto"] < math.log(1 + 2 * most)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_what_keys_and_values_of_few_bits_cost(demo_files: ModelFiles, kv_cache_dtype: str) -> None:
    token_ids = load_tokenizer(demo_files).encode(DEFAULT_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    plain, num_tokens = measure_loss(demo_files, "int8_cpu", token_ids[:8192], 1024)
    quantised, _ = measure_loss(demo_files, "int8_cpu", token_ids[:8192], 1024, kv_cache_dtype)
    assert num_tokens == 8 * 1023
    assert quantised - plain < math.log(1 + MAX_CHANGES[kv_cache_dtype])


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("quantization", ["int8_cpu", "int8_torch"])
def test_int8_raises_perplexity_by_less_than_one_percent(demo_files: ModelFiles, quantization: str) -> None:
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    token_ids = load_tokenizer(demo_files).encode(text, add_special_tokens=False)
    assert len(token_ids) > 20_000
    plain, num_tokens = measure_loss(demo_files, "none", token_ids, 1024)
    quantised, _ = measure_loss(demo_files, quantization, token_ids, 1024)
    assert num_tokens == len(token_ids) - math.ceil(len(token_ids) / 1024)
    assert 1 < math.exp(plain) < 30
    assert quantised - plain < math.log(1.01)
