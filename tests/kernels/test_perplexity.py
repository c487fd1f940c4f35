"""The demo model predicts a text as well with int8 weights: perplexity within 1 % over 36,000 tokens, 2 % over 500."""

import math

import pytest

from aserve.bench.perplexity import DEFAULT_TEXT, measure_loss
from aserve.model_files import ModelFiles
from aserve.tokenizer.load import load_tokenizer


def test_int8_on_the_first_windows_raises_perplexity_by_less_than_two_percent(demo_files: ModelFiles) -> None:
    text = DEFAULT_TEXT.read_text(encoding="utf-8")[:4096]
    token_ids = load_tokenizer(demo_files).encode(text, add_special_tokens=False)[:512]
    assert len(token_ids) == 512
    plain, num_tokens = measure_loss(demo_files, "none", token_ids, 128)
    quantised, _ = measure_loss(demo_files, "int8_cpu", token_ids, 128)
    assert num_tokens == 4 * 127
    assert 1 < math.exp(plain) < 50
    assert abs(quantised - plain) < math.log(1.02)


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
