"""The built-in configs have the shapes of the published models."""

import math

import pytest
import torch

from aserve.builtin_models import BUILTIN_MODELS, find_builtin
from aserve.kernels.operators import Operators
from aserve.layers.weighted import WeightFormat
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.quantization.unquantized import Unquantized

# Parameters as the model cards' safetensors say; Qwen3-0.6B without the copy of its tied head.
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mixtral-8x7B": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def test_each_is_of_known_size() -> None:
    assert PARAMETERS.keys() == BUILTIN_MODELS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    weights = WeightFormat(Unquantized(), torch.bfloat16, torch.device("meta"))
    model = Decoder(DecoderConfig.from_hf(BUILTIN_MODELS[name]), weights, Operators())
    sizes = [math.prod(slot.shape) for slot in model.slots().values() if not slot.is_optional]
    assert sum(sizes) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_reads_the_same_shape(name: str) -> None:
    from transformers import AutoConfig

    ours = DecoderConfig.from_hf(BUILTIN_MODELS[name])
    theirs = AutoConfig.for_model(**BUILTIN_MODELS[name])
    assert DecoderConfig.from_hf(theirs.to_dict() | {"architectures": [ours.architecture]}) == ours


def test_the_rope_of_llama_is_the_scaled_one() -> None:
    rope = DecoderConfig.from_hf(BUILTIN_MODELS["Llama-3.1-8B"]).rope
    assert (rope.scaling, rope.theta, rope.factor, rope.original_context_len) == ("llama3", 500000.0, 8.0, 8192)


@pytest.mark.parametrize("spelling", ["Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B"])
def test_a_name_is_found_with_its_organisation_and_in_any_case(spelling: str) -> None:
    found = find_builtin(spelling)
    assert found is not None
    assert found[0] == "Qwen3-8B"


@pytest.mark.parametrize("spelling", ["", "Qwen3", "Qwen3-8B/", "Qwen3-8B-Base"])
def test_other_names_are_not_guessed_at(spelling: str) -> None:
    assert find_builtin(spelling) is None
