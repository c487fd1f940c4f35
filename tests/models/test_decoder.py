"""The decoder against transformers: tiny random checkpoints, prefill in chunks and decoding over scattered pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_gpt_oss import GPT_OSS
from doubles_models import TINY, PagedSequence, edit_config, load_folder, make_oracle, save_with_noise
from doubles_moe import MIXTRAL, QWEN3_MOE
from doubles_runner import single_plan
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.config import EngineConfig
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.runner.build import build_runner

NUM_TOKENS = 40
CHUNKS = (1, 7, 20, 1, 1, 1, 9)  # sums to NUM_TOKENS
TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0], [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PHI3: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = PHI3 | {"head_dim": 24, "tie_word_embeddings": True, "query_pre_attn_scalar": 12, "sliding_window": 6}
GEMMA3 = GEMMA | {"num_hidden_layers": 7}  # the sixth sees all keys
SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one head per key": ("llama", {"num_key_value_heads": 4}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, own head size": ("llama", {"head_dim": 24}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, eps and theta": ("llama", {"rms_norm_eps": 0.1, "rope_parameters": {"rope_theta": 300.0}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "llama, llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2, yarn with its options": (
        "qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}},
    ),
    "llama, yarn with mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "llama, dynamic within the context": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2, window on upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, head size by default": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3, window by layer types": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma2, every layer sliding": ("gemma2", GEMMA | {"layer_types": ["sliding_attention"] * 3}),
    "gemma2, own head and biases": ("gemma2", GEMMA | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2, without caps": ("gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, tight caps": ("gemma2", GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3, every layer full": ("gemma3_text", GEMMA | {"layer_types": ["full_attention"] * 3}),
    "gemma3, two ropes": (
        "gemma3_text",
        GEMMA
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": SCALED},
    ),
    "gemma3, logits capped, own head": (
        "gemma3_text",
        GEMMA3 | {"final_logit_softcapping": 2.0, "tie_word_embeddings": False},
    ),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral, window": ("mixtral", MIXTRAL | {"sliding_window": 6, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe, weights of all experts": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": False}),
    "qwen3_moe, plain layers between": (
        "qwen3_moe",
        QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_moe, window": ("qwen3_moe", QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 5}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, three layers of a kind": (
        "gpt_oss",
        GPT_OSS | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "num_experts_per_tok": 1},
    ),
    "gpt_oss, tight clamps, no biases of attention": (
        "gpt_oss",
        GPT_OSS | {"attention_bias": False, "swiglu_limit": 0.25, "swiglu_alpha": 1.1, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", PHI3),
    "phi3, one head per key and window": ("phi3", PHI3 | {"num_key_value_heads": None, "sliding_window": 6}),
    "phi3, rotating in part": ("phi3", PHI3 | {"rope_parameters": {"partial_rotary_factor": 0.75}}),
    "phi3, tied": ("phi3", PHI3 | {"tie_word_embeddings": True}),
    "phi3, long factors": ("phi3", PHI3 | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3, short factors": ("phi3", PHI3 | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3, long factors of a part": (
        "phi3",
        PHI3
        | {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": SHORT[:6], "long_factor": LONG[:6]},
            "original_max_position_embeddings": 16,
        },
    ),
}


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, 99, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.inference_mode()
def reference_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def cut(token_ids: list[int]) -> list[list[int]]:
    return [chunk.tolist() for chunk in torch.split(torch.tensor(token_ids), CHUNKS)]


def logits_in_chunks(folder: Path, token_ids: list[int]) -> Tensor:
    sequence = PagedSequence(load_folder(folder), len(token_ids))
    return torch.cat([sequence.step(chunk) for chunk in cut(token_ids)])


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path, token_ids: list[int]) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    expected = reference_logits(oracle, token_ids)
    assert expected.std() > 0.5, "the comparison means nothing for logits near zero"
    torch.testing.assert_close(logits_in_chunks(tmp_path, token_ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", ["llama, linear", "llama, llama3", "llama, yarn", "llama, eps and theta"])
def test_old_spelling_of_rope_scaling(case: str, tmp_path: Path, token_ids: list[int]) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    parameters = edit_config(tmp_path, {})["rope_parameters"]
    theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
    scaling = {"type": kind, **parameters} if kind != "default" else None
    edit_config(tmp_path, {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling})
    torch.testing.assert_close(
        logits_in_chunks(tmp_path, token_ids), reference_logits(oracle, token_ids), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize(("max_model_len", "is_long"), [(41, True), (40, False)])
def test_longrope_factors_follow_the_longest_sequence(
    max_model_len: int, is_long: bool, tmp_path: Path, token_ids: list[int]
) -> None:
    """transformers takes the set by the length of a forward: 40 tokens are long for an original context of 39."""
    changes = {"rope_parameters": LONGROPE | {"attention_factor": 1.1}, "original_max_position_embeddings": 40}
    oracle = make_oracle("phi3", PHI3 | changes, tmp_path)
    model = load_folder(tmp_path)
    model.fit(max_model_len)
    sequence = PagedSequence(model, NUM_TOKENS)
    logits = torch.cat([sequence.step(chunk) for chunk in cut(token_ids)])
    short = reference_logits(oracle, token_ids)
    oracle.config.rope_parameters["original_max_position_embeddings"] = 39
    long = reference_logits(oracle, token_ids)
    assert (long - short).abs().max() > 0.1
    torch.testing.assert_close(logits, long if is_long else short, rtol=0, atol=TOLERANCE)


def test_old_spelling_of_two_ropes_and_of_windows(tmp_path: Path, token_ids: list[int]) -> None:
    """As in the configs of Gemma 3's release."""
    oracle = make_oracle("gemma3_text", GEMMA | {"rope_parameters": SCALED, "sliding_window_pattern": 2}, tmp_path)
    edit_config(
        tmp_path,
        {
            "rope_parameters": None,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_theta": 500.0,
            "rope_local_base_freq": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    )
    torch.testing.assert_close(
        logits_in_chunks(tmp_path, token_ids), reference_logits(oracle, token_ids), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_with_vision(prefix: str, tmp_path: Path, token_ids: list[int]) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(text_config=TINY | GEMMA3, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    oracle = save_with_noise(Gemma3ForConditionalGeneration(config), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("language_model.model.", "model.language_model."): t for name, t in tensors.items()}
    renamed = {name.replace("model.language_model.", prefix): tensor for name, tensor in renamed.items()}
    assert sum(name.startswith(prefix) for name in renamed) > 50
    save_file(renamed, tmp_path / "model.safetensors")
    torch.testing.assert_close(
        logits_in_chunks(tmp_path, token_ids), reference_logits(oracle, token_ids), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe, plain layers between"])
def test_experts_of_a_layer_in_two_tensors(case: str, tmp_path: Path, token_ids: list[int]) -> None:
    """As transformers keeps them in memory; it takes them apart when it saves."""
    oracle = make_oracle(*CASES[case], tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(".experts.4." in name for name in saved)
    merged = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    assert not any(".experts.4." in name for name in merged)
    save_file(merged, tmp_path / "model.safetensors")
    torch.testing.assert_close(
        logits_in_chunks(tmp_path, token_ids), reference_logits(oracle, token_ids), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize(
    "case",
    [
        "mixtral",
        "qwen3_moe, weights of all experts",
        "phi3, rotating in part",
        "phi3, long factors",
        "gemma2, tight caps",
        "gemma3",
        "gpt_oss",
    ],
)
def test_tokens_of_a_runner_equal_transformers(case: str, tmp_path: Path, token_ids: list[int]) -> None:
    """With the operators and the attention that a CPU gets."""
    oracle = make_oracle(*CASES[case], tmp_path)
    config = EngineConfig(device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=64)
    runner = build_runner(config, ModelFiles(tmp_path, "safetensors", "tiny"), frozenset())
    for length in range(20, 40, 3):
        best = reference_logits(oracle, token_ids[:length])[-1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "rounding could decide"
        tokens = runner.launch(single_plan(token_ids[:length], page_size=16)).result(timeout=20)
        assert list(tokens.token_ids) == [int(best.indices[0])]
    runner.close()


@torch.inference_mode()
def test_norms_with_an_offset_round_as_in_transformers(tmp_path: Path) -> None:
    """The weights are small: their sums with 1 would lose most of their digits in bfloat16."""
    oracle = make_oracle("gemma2", GEMMA, tmp_path).bfloat16()
    oracle.model.norm.weight.mul_(0.01)
    oracle.save_pretrained(tmp_path)
    model = load_folder(tmp_path, dtype=torch.bfloat16)
    (weight,) = (layer.tensors["weight"] for layer in model.weighted_layers() if layer.name == "model.norm")
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert torch.equal(Operators().rms_norm(x, weight, 1e-6), oracle.model.norm(x))


@torch.inference_mode()
def test_embeddings_are_scaled_by_a_rounded_root(tmp_path: Path) -> None:
    """In bfloat16 the root of 96 channels, 9.798, is 9.8125: what the first layer gets shows which one was taken."""
    oracle = make_oracle("gemma2", GEMMA | {"hidden_size": 96, "num_hidden_layers": 1}, tmp_path).bfloat16()
    model = load_folder(tmp_path, dtype=torch.bfloat16)
    for layer in model.weighted_layers():
        if layer.name.endswith(("o_proj", "down_proj")):  # so that nothing is added behind the embeddings
            layer.tensors["weight"].zero_()
    expected = oracle.model.embed_tokens(torch.arange(50))
    assert expected.dtype == torch.bfloat16
    assert torch.equal(PagedSequence(model, 50, torch.bfloat16).hidden(list(range(50))), expected)


def test_old_spelling_of_longrope(tmp_path: Path, token_ids: list[int]) -> None:
    """As in the configs of Phi-3-mini-128k: rope_theta outside, "su" or "longrope" as "type"."""
    oracle = make_oracle(*CASES["phi3, long factors"], tmp_path)
    edit_config(
        tmp_path,
        {
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
        },
    )
    torch.testing.assert_close(
        logits_in_chunks(tmp_path, token_ids), reference_logits(oracle, token_ids), rtol=0, atol=TOLERANCE
    )


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@torch.inference_mode()
def test_dynamic_rope_equals_decoding_past_the_context(tmp_path: Path, token_ids: list[int]) -> None:
    changes = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}
    oracle = make_oracle("llama", changes, tmp_path)
    sequence = PagedSequence(load_folder(tmp_path), NUM_TOKENS)
    result = oracle(torch.tensor([token_ids[:16]]), use_cache=True)
    torch.testing.assert_close(sequence.step(token_ids[:16]), result.logits[0], rtol=0, atol=TOLERANCE)
    for token_id in token_ids[16:]:
        result = oracle(torch.tensor([[token_id]]), past_key_values=result.past_key_values, use_cache=True)
        torch.testing.assert_close(sequence.step([token_id]), result.logits[0], rtol=0, atol=TOLERANCE)
