"""The Triton operators on a GPU at the sizes of real models, against float64, in graphs and overlapping."""

from collections.abc import Callable, Iterator

import pytest
import torch
from doubles_operators import (
    EPS,
    Dense,
    RopeCase,
    assert_near,
    linear64,
    norm64,
    poison_new_memory,
    silu_mul64,
)
from torch import Tensor

from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.layer_case import LayerShape, model_layers
from aserve.kernels.gpu.small_linear import NormBefore, SmallLinear, apply_small_linear
from aserve.kernels.nvfp4 import BlockScales
from aserve.kernels.operators import HeadLayout, KVTarget, Operators

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
LAYERS = [
    pytest.param(layer, id=f"{model} {layer.name}")
    for model, num_layers in (("Qwen3-0.6B", 5), ("Qwen3-8B", 4))  # one head is enough
    for layer in model_layers(model)[:num_layers]
]
OVERLAPS = [False, True]


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_memory(monkeypatch)


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("width", [1024, 4096, 5120, 16384])
@pytest.mark.parametrize("num_tokens", [1, 17, 3000])
def test_norms_and_silu(num_tokens: int, width: int) -> None:
    operators = GpuOperators()
    x, residual, weight = draw(num_tokens, width), draw(num_tokens, width), draw(width)
    assert_near(operators.rms_norm(x, weight, EPS), norm64(x, weight), BF16)
    total = x.double() + residual.double()
    normed, stream = operators.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(stream, x + residual)
    assert_near(normed, norm64(total, weight), BF16)
    gate_up = draw(num_tokens, 2 * width)
    assert_near(operators.silu_mul(gate_up), silu_mul64(gate_up), BF16)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("shape", LAYERS)
def test_small_linear_layers(shape: LayerShape, num_tokens: int, overlap: bool) -> None:
    layer = Dense(draw(shape.num_rows, shape.width) / shape.width**0.5, draw(shape.num_rows))
    x, residual, gain = draw(num_tokens, shape.width), draw(num_tokens, shape.width), draw(shape.width)
    before = x.clone(), residual.clone()
    norm = NormBefore(gain, EPS, residual) if shape.has_norm else None
    small = SmallLinear(layer.dense_weight, layer.bias, shape.is_gated)
    result = torch.empty(num_tokens, shape.num_outputs, device=DEVICE)
    total = apply_small_linear(x, small, norm, result, overlap)
    inputs = x.double()
    if norm is not None:
        assert torch.equal(total, x + residual)
        inputs = norm64(x + residual, gain)
    expected = linear64(inputs, layer)
    assert_near(result, silu_mul64(expected) if shape.is_gated else expected, torch.float32)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_logits_are_not_rounded_to_the_activations_dtype(num_tokens: int) -> None:
    x, gain, layer = draw(num_tokens, 1024), draw(1024), Dense(draw(151936, 1024) / 32)
    logits = GpuOperators().norm_logits(x, gain, EPS, layer)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).float().mean() > 0.9
    assert_near(logits, linear64(norm64(x, gain), layer), BF16)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("is_head_major", [False, True])
@pytest.mark.parametrize("page_dtype", [BF16, FLOAT8])
@pytest.mark.parametrize("num_tokens", [1, 5, 2000])
@pytest.mark.parametrize("heads", [HeadLayout(16, 8, 128), HeadLayout(32, 8, 128), HeadLayout(14, 2, 64)], ids=str)
def test_rope_store(
    heads: HeadLayout, num_tokens: int, page_dtype: torch.dtype, is_head_major: bool, overlap: bool
) -> None:
    scales = (0.25, 0.5) if page_dtype == FLOAT8 else (1.0, 1.0)
    case = RopeCase(
        heads, 16, is_head_major, True, BF16, page_dtype, num_tokens, DEVICE, 4096, max_position=2000, scales=scales
    )
    qkv, norms, cos_sin, positions, target = case.make()
    expected_q, *expected_kv = case.expect(qkv, norms, cos_sin, positions)
    q = GpuOperators(overlap=overlap).rope_store(qkv.clone(), heads, norms, cos_sin, positions, target)
    assert_near(q, expected_q, BF16)
    for pages, expected, scale in zip((target.key, target.value), expected_kv, scales, strict=True):
        stored = case.read(pages, target.slot_mapping)
        if page_dtype == BF16:
            assert_near(stored, expected, BF16)
        else:  # three bits behind the point: 0.026 if rounded to the nearest, twice that if cut off
            wanted = (expected / scale).clamp(-448, 448)
            assert (stored - wanted).norm() / wanted.norm() < 0.035


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("num_tokens", [1, 5, 2000])
@pytest.mark.parametrize("heads", [HeadLayout(32, 8, 128), HeadLayout(14, 2, 64), HeadLayout(6, 2, 96)], ids=str)
def test_rope_store_in_nvfp4(heads: HeadLayout, num_tokens: int, overlap: bool) -> None:
    """A sum that is rounded otherwise may change an element or the scale of a block now and then."""
    case = RopeCase(heads, 16, False, True, BF16, BF16, num_tokens, DEVICE, 4096, max_position=2000)
    qkv, norms, cos_sin, positions, target = case.make()
    sizes = (4096 // 16, 16, heads.num_kv_heads)
    found = []
    for operators in (GpuOperators(overlap=overlap), Operators()):
        key, value = (torch.zeros(*sizes, heads.head_dim // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        blocks = (torch.zeros(*sizes, heads.head_dim // 16, dtype=FLOAT8, device=DEVICE) for _ in range(2))
        packed = KVTarget(key, value, target.slot_mapping, 0.01, 0.02, BlockScales(*blocks))
        operators.rope_store(qkv.clone(), heads, norms, cos_sin, positions, packed)
        assert packed.block_scales is not None
        block_scales = (packed.block_scales.key, packed.block_scales.value)
        found.append((key, value, *(part.view(torch.uint8) for part in block_scales)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.any()
        assert (ours != theirs).float().mean() < 0.01


def test_pools_of_more_than_two_to_the_31_values() -> None:
    heads = HeadLayout(8, 8, 128)
    num_slots = 2**31 // 1024 + 4096
    case = RopeCase(heads, 16, False, False, BF16, FLOAT8, 2, DEVICE)
    qkv, _, cos_sin, positions, _ = case.make()
    pages = torch.zeros(2, num_slots // 16, 16, 8, 128, dtype=FLOAT8, device=DEVICE)
    target = KVTarget(pages[0], pages[1], torch.tensor([num_slots - 1, 7], device=DEVICE))
    GpuOperators().rope_store(qkv.clone(), heads, None, cos_sin, positions, target)
    value = qkv.view(2, 24, 128)[:, 16:].float()
    assert torch.equal(target.value.flatten(0, 1)[target.slot_mapping].float(), value.to(FLOAT8).float())
    assert not target.value[:-1].view(torch.uint8)[1:].any()


def feed_forward(operators: GpuOperators, num_tokens: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a chain of layers, each of which reads what the one before it wrote; no other kernel is in between."""
    hidden, inner, gain = 1024, 3072, draw(1024)
    gate_ups = [Dense(draw(2 * inner, hidden) / 32) for _ in range(6)]
    downs = [Dense(draw(hidden, inner) / 55) for _ in range(6)]
    x, residual = draw(num_tokens, hidden), draw(num_tokens, hidden)

    def run() -> tuple[Tensor, Tensor]:
        update, stream = x.clone(), residual.clone()
        for gate_up, down in zip(gate_ups, downs, strict=True):
            inner_values, stream = operators.add_norm_gate_up(update, stream, gain, EPS, gate_up)
            update = operators.linear(inner_values, down)
        return operators.add_rms_norm(update, stream, gain, EPS)

    return run


@pytest.mark.parametrize("num_tokens", [1, 4, 40])
def test_overlapping_kernels_of_a_graph_compute_what_others_do(num_tokens: int) -> None:
    results = []
    for overlap in OVERLAPS:
        torch.manual_seed(1)
        run = feed_forward(GpuOperators(overlap=overlap), num_tokens)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        for _ in range(50):
            output[0].fill_(torch.nan)
            graph.replay()
            results.append(torch.stack(output).clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_nothing_compiles_for_another_number_of_tokens(counter: CompileCounter) -> None:
    operators, heads = GpuOperators(), HeadLayout(16, 8, 128)
    layer, gain = Dense(draw(64, 1024)), draw(1024)

    def run(num_tokens: int, first: int) -> None:
        x = draw(num_tokens + first, 1024)[first:]
        operators.add_norm_gate_up(x, x.clone(), gain, EPS, layer)
        operators.norm_logits(x, gain, EPS, layer)
        case = RopeCase(heads, 16, False, True, BF16, BF16, num_tokens + first, DEVICE, 512)
        qkv, norms, cos_sin, positions, target = case.make()
        shifted = KVTarget(target.key, target.value, target.slot_mapping[first:])
        operators.rope_store(qkv[first:], heads, norms, cos_sin, positions[first:], shifted)

    for num_tokens in (1, 2, 4, 8):
        run(num_tokens, 0)
    counter.mark()
    for num_tokens in (1, 2, 3, 4, 5, 16, 17, 333):
        run(num_tokens, 0)
        run(num_tokens, 1)  # tables that are not aligned to 16 bytes
    assert counter.compilations() == 0
