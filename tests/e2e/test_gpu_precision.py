"""In bfloat16 every attention backend comes as close to a float32 run as transformers does in bfloat16.

The float32 run is transformers', and so is the yardstick; both score the very tokens that the engine has seen and
sampled. For each position the log probabilities of float32's 20 best tokens are compared, as far as the run in
bfloat16 reports them too: an engine reports 20, and the same cut is made for transformers, so that both lose the same
kind of token, the unlikely one. The figure is the root of the mean square over some 10,000 values for the prompts
(prefill) and as many for what follows (decode), which leaves little to chance.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from doubles_attention_gpu import usable_settings
from doubles_demo_engine import DEVICE, MakeEngine, complete_all, settled_stats
from doubles_models import read_demo_in_transformers
from reference.margins import read_reference
from torch import Tensor

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.registry import PAGE_SIZES
from aserve.bench.perplexity import DEFAULT_TEXT
from aserve.model_files import ModelFiles
from aserve.request import RequestOutput, SamplingParams, TokenLogprobs
from aserve.tokenizer.load import load_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NUM_TOP, NUM_TOKENS = 20, 32
MAX_RATIO = 1.5  # of our error to transformers'
MAX_RATIOS = {"fp8": 16.0, "nvfp4": 64.0}  # keys and values have 4 and 6 bits of mantissa fewer than in bfloat16
CLEAR_MARGIN = 0.5  # between float32's two best log probabilities; bfloat16 errs by less than a fifth of that
MIN_AGREEMENT = 0.99
MIN_AGREEMENTS = {"fp8": 0.9, "nvfp4": 0.8}
MAX_COSTS = {"auto": 0.005, "fp8": 0.01, "nvfp4": 0.03}  # of perplexity, beside transformers in bfloat16
NUM_WINDOWS, WINDOW_LEN = 16, 500  # of a text
DEMO = AttentionKind(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
SIZES: dict[str, Any] = {
    "dtype": "bfloat16", "max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 512, "num_pages": 1200,
}  # fmt: skip
Score = Callable[[Sequence[int]], Tensor]


def settings_here() -> list[str]:
    """Return all backends and pairs that this GPU and the demo model allow with some page size."""
    if not torch.cuda.is_available():
        return ["fi"]  # collected, not run
    bf16, capability = torch.bfloat16, torch.cuda.get_device_capability()
    problems = [AttentionProblem("cuda", bf16, bf16, page_size, (DEMO,), capability) for page_size in PAGE_SIZES]
    return list(dict.fromkeys(setting for problem in problems for setting in usable_settings(problem)))


@dataclass
class Errors:
    """Of log probabilities, for prompts and for what follows, and how often the best tokens agree."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)

    def add(self, exact: Tensor, top: dict[int, float], *, is_decode: bool) -> None:
        """Compare the best tokens ``top`` of a run with float32's log probabilities [V] at the same position."""
        best = exact.topk(NUM_TOP)
        values = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        (self.decode if is_decode else self.prefill).extend(top[token] - values[token] for token in values.keys() & top)
        first, second, *_ = best.values.tolist()
        if first - second >= CLEAR_MARGIN:
            self.agreements.append(max(top, key=lambda token: top[token]) == int(best.indices[0]))

    @property
    def agreement(self) -> float:
        """Share of the clear positions at which the best tokens are the same."""
        return sum(self.agreements) / len(self.agreements)

    def __str__(self) -> str:
        return f"error {rms(self.prefill):.4f} prefill, {rms(self.decode):.4f} decode, agreement {self.agreement:.3f}"


def rms(errors: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(sum(error * error for error in errors) / len(errors))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt["prompt_token_ids"] for prompt in read_reference("greedy_reference.json")[1::2]]


@pytest.fixture(scope="module")
def scores(demo_files: ModelFiles) -> tuple[Score, Score]:
    """Log probabilities [T, V] after each token of a text, by transformers in float32 and in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, tensors = read_demo_in_transformers(demo_files.path)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (DEMO.num_heads, DEMO.num_kv_heads)

    def load(dtype: torch.dtype) -> Score:
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        model = model.eval().to(DEVICE, dtype)

        @torch.inference_mode()
        def score(token_ids: Sequence[int]) -> Tensor:
            logits: Tensor = model(torch.tensor([token_ids], device=DEVICE)).logits[0]
            return logits.float().log_softmax(-1)

        return score

    return load(torch.float32), load(torch.bfloat16)


def test_flash_infer_is_among_the_backends() -> None:
    assert "fi" in settings_here()


@pytest.mark.parametrize("setting", settings_here())
def test_log_probabilities_of_every_backend(
    setting: str, make_engine: MakeEngine, prompts: list[list[int]], scores: tuple[Score, Score]
) -> None:
    engine = make_engine(**SIZES, attention_backend=setting)
    cold, warm = asyncio.run(run_cold_and_warm(engine, prompts))
    ours, theirs = compare(cold, prompts, scores)
    print(f"{setting}: {ours}; transformers: {theirs}")
    assert min(len(ours.prefill), len(ours.decode), len(theirs.prefill)) > 8_000
    assert rms(ours.prefill) <= MAX_RATIO * rms(theirs.prefill)
    assert rms(ours.decode) <= MAX_RATIO * rms(theirs.decode)
    assert len(ours.agreements) > 400
    assert ours.agreement >= MIN_AGREEMENT
    changes = first_token_changes(cold, warm)
    assert len(changes) > 100
    assert rms(changes) <= MAX_RATIO * rms(theirs.prefill)


@pytest.mark.parametrize(("setting", "kv_cache_dtype"), [("fi", "fp8"), ("cake", "fp8"), ("cake", "nvfp4")])
def test_a_cache_of_few_bits(
    setting: str, kv_cache_dtype: str, make_engine: MakeEngine, prompts: list[list[int]], scores: tuple[Score, Score]
) -> None:
    """Coarser, but the same model; it must also make a difference, else the cache is not what was asked for."""
    engine = make_engine(**SIZES, attention_backend=setting, kv_cache_dtype=kv_cache_dtype)
    cold, warm = asyncio.run(run_cold_and_warm(engine, prompts))
    ours, theirs = compare(cold, prompts, scores)
    print(f"{setting}, {kv_cache_dtype}: {ours}; transformers: {theirs}")
    max_ratio = MAX_RATIOS[kv_cache_dtype]
    assert rms(theirs.prefill) < rms(ours.prefill) <= max_ratio * rms(theirs.prefill)
    assert rms(theirs.decode) < rms(ours.decode) <= max_ratio * rms(theirs.decode)
    assert ours.agreement >= MIN_AGREEMENTS[kv_cache_dtype]
    assert rms(first_token_changes(cold, warm)) <= max_ratio * rms(theirs.prefill)


@pytest.mark.parametrize(
    ("setting", "kv_cache_dtype"), [("fi", "auto"), ("fi", "fp8"), ("cake", "auto"), ("cake", "fp8"), ("cake", "nvfp4")]
)
def test_perplexity_with_a_cache_of_few_bits(
    setting: str, kv_cache_dtype: str, make_engine: MakeEngine, demo_files: ModelFiles, scores: tuple[Score, Score]
) -> None:
    """Of a long text, in windows: each token is predicted from keys and values as they are stored."""
    token_ids = load_tokenizer(demo_files).encode(DEFAULT_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = [token_ids[place * WINDOW_LEN :][:WINDOW_LEN] for place in range(NUM_WINDOWS)]
    engine = make_engine(**SIZES, attention_backend=setting, kv_cache_dtype=kv_cache_dtype)

    async def read_windows() -> list[RequestOutput]:
        async with engine:
            return await complete_all(engine, windows, SamplingParams(max_tokens=1, prompt_logprobs=1))

    ours: list[float] = []
    for output in asyncio.run(read_windows()):
        assert output.prompt_logprobs is not None
        ours += [answer.logprob for answer in output.prompt_logprobs if answer is not None]
    _, score_roughly = scores
    theirs = torch.cat(
        [score_roughly(one)[:-1].gather(1, torch.tensor(one[1:], device=DEVICE)[:, None]) for one in windows]
    )
    assert len(ours) == len(theirs) == NUM_WINDOWS * (WINDOW_LEN - 1)
    cost = math.exp(theirs.double().mean().item() - sum(ours) / len(ours)) - 1
    print(f"{setting}, {kv_cache_dtype}: perplexity {cost:+.2%}")
    assert cost < MAX_COSTS[kv_cache_dtype]


async def run_cold_and_warm(engine: Any, prompts: list[list[int]]) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return greedy outputs with log probabilities; then the first tokens again, of prompts that are cached by now."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": NUM_TOP}
    async with engine:
        cold = await complete_all(
            engine, prompts, SamplingParams(max_tokens=NUM_TOKENS, prompt_logprobs=NUM_TOP, **greedy)
        )
        warm = await complete_all(engine, prompts, SamplingParams(max_tokens=1, **greedy))
        page_size = engine.limits.page_size
        await settled_stats(engine)
    for output, prompt in zip(warm, prompts, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // page_size * page_size
    assert not any(output.num_cached_tokens for output in cold)
    return cold, warm


def compare(
    outputs: Sequence[RequestOutput], prompts: Sequence[Sequence[int]], scores: tuple[Score, Score]
) -> tuple[Errors, Errors]:
    """Return the errors of ``outputs`` and of transformers in bfloat16 over the same tokens."""
    ours, theirs = Errors(), Errors()
    score_exactly, score_roughly = scores
    for output, prompt in zip(outputs, prompts, strict=True):
        token_ids = [*prompt, *output.token_ids[:-1]]
        exact, rough = score_exactly(token_ids).cpu(), score_roughly(token_ids).cpu()
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        reported = [*output.prompt_logprobs[1:], *output.logprobs]
        assert len(reported) == len(token_ids)
        for position, answer in enumerate(reported):
            assert answer is not None
            is_decode = position >= len(prompt)  # the first output comes from the prompt's last token
            ours.add(exact[position], top_of(answer), is_decode=is_decode)
            best = rough[position].topk(NUM_TOP)
            theirs.add(
                exact[position],
                dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
                is_decode=is_decode,
            )
    return ours, theirs


def top_of(answer: TokenLogprobs) -> dict[int, float]:
    """Return token -> log probability."""
    return dict(answer.top)


def first_token_changes(cold: Sequence[RequestOutput], warm: Sequence[RequestOutput]) -> list[float]:
    """Return by how much log probabilities of the first output differ, where a page of the prompt was cached."""
    changes = []
    for one, other in zip(cold, warm, strict=True):
        if other.num_cached_tokens:
            assert one.logprobs is not None
            assert other.logprobs is not None
            before, after = top_of(one.logprobs[0]), top_of(other.logprobs[0])
            changes += [after[token] - before[token] for token in before.keys() & after]
    return changes
