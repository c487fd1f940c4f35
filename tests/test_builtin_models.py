"""The built-in configs have the shapes of the published models."""

import math

import pytest
import torch

from aserve.builtin_models import ALIASES, BUILTIN_MODELS, find_builtin, require_builtin
from aserve.errors import ConfigError
from aserve.kernels.operators import Operators
from aserve.layers.weighted import WeightFormat
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.quantization.unquantized import Unquantized

VISION_TOWER = 416_866_032  # of Gemma 3, which runs without; its projection and norm are rows of 1152

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
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-4b": 4_300_079_472 - VISION_TOWER - 1152 * (2560 + 1),
    "gemma-3-12b": 12_187_325_040 - VISION_TOWER - 1152 * (3840 + 1),
    "Phi-3-mini-4k": 3_821_079_552,
    "Phi-3-medium-4k": 13_960_238_080,
}


def test_each_is_of_known_size() -> None:
    assert PARAMETERS.keys() == BUILTIN_MODELS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.layers.rotary.RotaryTable._build", lambda self, divisors: torch.empty(0))
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


def test_gemma_and_phi_attend_as_published() -> None:
    """Every other layer of Gemma 2 has a window, five of six of Gemma 3, all of Phi-3."""
    gemma2, gemma3, phi3 = (
        DecoderConfig.from_hf(BUILTIN_MODELS[name]) for name in ("gemma-2-9b", "gemma-3-4b", "Phi-3-mini-4k")
    )
    assert gemma2.sliding_windows == (4096, None) * 21
    assert gemma3.sliding_windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert phi3.sliding_windows == (2047,) * 32
    assert (gemma2.attention_softcap, gemma2.logits_softcap, gemma2.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (gemma3.rope.scaling, gemma3.rope.factor, gemma3.rope.theta) == ("linear", 8.0, 1e6)
    assert gemma3.local_rope is not None
    assert gemma3.local_rope.theta == 1e4
    assert (phi3.head_dim, phi3.num_kv_heads) == (96, 32)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen3-8B", "Qwen3-8B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("google/gemma-3-12b-pt", "gemma-3-12b"),
        ("microsoft/Phi-3-mini-4k-instruct", "Phi-3-mini-4k"),
        ("microsoft/Phi-3-medium-4k-instruct", "Phi-3-medium-4k"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-8B"),
        ("Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_a_name_is_found_as_it_is_published_in_any_case_and_for_chats(spelling: str, name: str) -> None:
    found = find_builtin(spelling)
    assert found is not None
    assert found == (name, BUILTIN_MODELS[name])


# The context of Qwen3-8B-Base is shorter, and there is no Qwen3-8B-it.
OTHERS = ["", "-it", "Qwen3", "Qwen3-8B/", "Qwen3-8B-Base", "Qwen3-8B-it", "gemma-3-1b-it", "Mixtral-8x22B-v0.1"]


@pytest.mark.parametrize("spelling", OTHERS)
def test_other_names_are_not_guessed_at(spelling: str) -> None:
    assert find_builtin(spelling) is None


@pytest.mark.parametrize(
    ("spelling", "hint"),
    [
        ("meta-llama/Meta-Llama-3-8B", "; did you mean Meta-Llama-3.1-8B?; built in: Qwen3-0.6B, "),
        ("qwen3-8b-base", "; did you mean Qwen3-8B?; built in: "),
        ("openai/gpt-oss-20", "; did you mean gpt-oss-20b?; built in: "),
        ("deepseek-ai/DeepSeek-V3", " is neither; built in: "),
    ],
)
def test_a_miss_names_what_is_near(spelling: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_builtin(spelling)
    assert repr(spelling) in str(caught.value)
    assert hint in str(caught.value)


def test_each_alias_stands_for_a_model_and_hides_none() -> None:
    assert set(ALIASES.values()) <= BUILTIN_MODELS.keys()
    assert not {alias.lower() for alias in ALIASES} & {name.lower() for name in BUILTIN_MODELS}
