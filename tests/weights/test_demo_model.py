"""The demo model against what transformers says of the same weights (tests/reference)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_models import PagedSequence, load_folder, read_demo_in_transformers
from safetensors.torch import save_file
from torch import Tensor

from aserve.model_files import ModelFiles
from aserve.models.decoder import Decoder

REFERENCE = Path(__file__).parent.parent / "reference" / "greedy_reference.json"
CLEAR_MARGIN = 1e-3  # below it, another order of float additions may choose another token
MARGIN_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def references() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["prompts"]
    return prompts


@pytest.fixture(scope="module")
def demo(demo_files: ModelFiles) -> Decoder:
    return load_folder(demo_files.path)


def output_logits(model: Decoder, reference: dict[str, Any]) -> Tensor:
    """Logits at the output positions when the reference's own tokens are fed, in one piece."""
    prompt, output = reference["prompt_token_ids"], reference["output_token_ids"]
    token_ids = prompt + output[:-1]
    return PagedSequence(model, len(token_ids)).step(token_ids)[len(prompt) - 1 :]


def assert_agrees(model: Decoder, reference: dict[str, Any]) -> int:
    """Return the number of tokens compared: those with a clear margin."""
    logits, margins = output_logits(model, reference), torch.tensor(reference["margins"])
    is_clear = margins >= CLEAR_MARGIN
    expected = torch.tensor(reference["output_token_ids"])
    assert torch.equal(logits.argmax(-1)[is_clear], expected[is_clear]), reference["name"]
    first, second = logits.topk(2).values.unbind(-1)
    torch.testing.assert_close(first - second, margins, rtol=0, atol=MARGIN_TOLERANCE)
    return int(is_clear.sum())


def test_reference_is_of_this_model(demo_files: ModelFiles) -> None:
    import hashlib

    sha256 = hashlib.sha256(demo_files.path.read_bytes()).hexdigest()
    assert json.loads(REFERENCE.read_text())["model_sha256"] == sha256


def test_most_likely_tokens(demo: Decoder, references: list[dict[str, Any]]) -> None:
    for reference in references[:8]:
        prompt = reference["prompt_token_ids"]
        logits = PagedSequence(demo, len(prompt)).step(prompt)[-1]
        assert logits.topk(5).indices.tolist() == reference["first_top_ids"], reference["name"]


@pytest.mark.parametrize("name", ["capital", "french", "python", "chat three turns", "manual"])
def test_choices_and_margins(demo: Decoder, references: list[dict[str, Any]], name: str) -> None:
    (reference,) = (row for row in references if row["name"] == name)
    assert assert_agrees(demo, reference) == 64


@pytest.mark.full
def test_all_choices_and_margins(demo: Decoder, references: list[dict[str, Any]]) -> None:
    assert sum(assert_agrees(demo, reference) for reference in references) >= 0.9 * 32 * 64


@pytest.mark.parametrize("method", ["int8", "int8_torch"])
def test_int8_stays_close(demo_files: ModelFiles, references: list[dict[str, Any]], method: str) -> None:
    """Most choices stay the same; the perplexity of a long text is measured by the benchmark."""
    model = load_folder(demo_files.path, method)
    agreed = total = 0
    for reference in references[3:8]:
        choices = output_logits(model, reference).argmax(-1)
        agreed += int((choices == torch.tensor(reference["output_token_ids"])).sum())
        total += len(choices)
    assert agreed >= 0.95 * total


@pytest.mark.full
@pytest.mark.parametrize("has_head", [False, True])
def test_demo_as_a_safetensors_folder(
    demo_files: ModelFiles, references: list[dict[str, Any]], has_head: bool, tmp_path: Path
) -> None:
    config, tensors = read_demo_in_transformers(demo_files.path)
    if has_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    assert assert_agrees(load_folder(tmp_path), references[3]) == 64
