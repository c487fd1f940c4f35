"""Plain draws by kernel: on a GPU if there is one, else under Triton's interpreter."""

import math

import numpy as np
import pytest
import torch
from doubles_sampling import assert_inverts_cdf, filters
from torch import Tensor

from aserve.sampling.draw import draw_tokens
from aserve.sampling.gpu.token_picker import PoolTarget, TokenPicker

pytestmark = pytest.mark.filterwarnings("ignore:(.* encountered in|All-NaN slice):RuntimeWarning")  # of numpy
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST = 1 - 2.0**-53


def pick(
    logits: Tensor, uniforms: Tensor, temperatures: Tensor, target: PoolTarget | None = None, max_rows: int = 64
) -> Tensor:
    picker = TokenPicker(max_rows, logits.shape[1], DEVICE)
    token_ids = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
    picker.pick_plain(logits.to(DEVICE), uniforms.to(DEVICE), temperatures.to(DEVICE), token_ids, target)
    return token_ids.cpu()


def make_rows(num_rows: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, uniforms with both ends among them, and temperatures with 0, tiny and huge ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    temperatures = torch.rand(num_rows, generator=generator) * 2 + 0.05
    uniforms[:2] = torch.tensor([0.0, LAST])
    temperatures[2:5] = torch.tensor([0.0, 1e-5, 100.0])
    return logits, uniforms, temperatures


@pytest.mark.parametrize("vocab_size", [1, 2, 2047, 2048, 2049, 5000])
def test_a_pick_inverts_the_cumulative_distribution(vocab_size: int) -> None:
    rows = make_rows(24, vocab_size, vocab_size)
    assert_inverts_cdf(pick(*rows), *rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_read_as_they_are(dtype: torch.dtype) -> None:
    logits, uniforms, temperatures = make_rows(12, 3000)
    logits = logits.to(dtype)
    assert_inverts_cdf(pick(logits, uniforms, temperatures), logits, uniforms, temperatures)


def test_a_pick_is_the_draw_of_the_torch_path() -> None:
    logits, uniforms, temperatures = make_rows(40, 4500, 3)
    temperatures[2:5] = 1.0
    off = filters([0] * 40, [1.0] * 40, [0.0] * 40)
    assert torch.equal(pick(logits, uniforms, temperatures).long(), draw_tokens(logits, uniforms, temperatures, off))


def test_even_uniforms_give_each_token_its_share() -> None:
    """100 numbers in the middles of equal intervals: a token of probability p is drawn 100 p times, to within one."""
    logits = torch.tensor([0.3, -1.0, 1.2, -math.inf, 2.0, -0.5, 0.9, 1.9, -2.0, 0.4])
    uniforms = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    ids = pick(logits.repeat(100, 1), uniforms, torch.full((100,), 0.7), max_rows=100)
    counts = np.bincount(ids.numpy(), minlength=10)
    expected = torch.softmax(logits.double() / 0.7, -1).numpy() * 100
    assert (np.abs(counts - expected) <= 1).all()
    assert counts[3] == 0


def test_the_lowest_of_equal_best_tokens_is_taken() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [2047, 2048, 4999]] = 5.0
    logits[1, [4096, 4999]] = 5.0
    assert pick(logits, torch.full((3,), LAST, dtype=torch.float64), torch.zeros(3)).tolist() == [2047, 4096, 0]


def test_tokens_without_weight_are_never_drawn() -> None:
    """Neither at the ends nor where whole blocks around them are minus infinity."""
    logits = torch.full((5, 9000), -torch.inf)
    logits[:, 5000] = 1.0
    logits[:, 5002] = 1.0
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75, LAST], dtype=torch.float64)
    assert pick(logits, uniforms, torch.ones(5)).tolist() == [5000, 5000, 5002, 5002, 5002]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits, uniforms, _ = make_rows(6, 4100)
    temperatures = torch.full((6,), temperature)
    expected = pick(logits, uniforms, temperatures)
    logits[1, 3000] = bad
    logits[4] = bad
    is_bad = [False, not math.isinf(bad) or bad > 0, False, False, True, False]
    pool = torch.full((7, 9), -5, dtype=torch.int32, device=DEVICE)
    rows, positions = torch.arange(6, device=DEVICE).int(), torch.full((6,), 8, device=DEVICE).int()
    got = pick(logits, uniforms, temperatures, PoolTarget(pool, rows, positions))
    for i in range(6):
        if is_bad[i]:
            assert (got[i], pool[i, 8]) == (-1, 0)
        elif i != 1:
            assert got[i] == pool[i, 8] == expected[i]


def test_ids_go_to_their_rows_and_positions_and_nowhere_else() -> None:
    """Padded rows share the dummy row's first position."""
    logits, uniforms, temperatures = make_rows(5, 2500)
    pool = torch.full((9, 12), -5, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([4, 0, 7, 8, 8], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([11, 0, 3, 0, 0], dtype=torch.int32, device=DEVICE)
    token_ids = pick(logits, uniforms, temperatures, PoolTarget(pool, rows, positions))
    assert [int(pool[4, 11]), int(pool[0, 0]), int(pool[7, 3])] == token_ids[:3].tolist()
    pool[4, 11] = pool[0, 0] = pool[7, 3] = pool[8, 0] = -5
    assert (pool == -5).all()


def test_a_row_alone_picks_what_it_picks_beside_others() -> None:
    logits, uniforms, temperatures = make_rows(9, 4200, 8)
    together = pick(logits, uniforms, temperatures, max_rows=9)
    for i in range(9):
        assert pick(logits[i : i + 1], uniforms[i : i + 1], temperatures[i : i + 1])[0] == together[i]


def test_one_work_space_serves_batches_of_any_size() -> None:
    picker = TokenPicker(16, 2300, DEVICE)
    for num_rows in (16, 6, 11):
        logits, uniforms, temperatures = (rows.to(DEVICE) for rows in make_rows(num_rows, 2300, num_rows))
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)
        picker.pick_plain(logits, uniforms, temperatures, token_ids)
        assert_inverts_cdf(token_ids, logits, uniforms, temperatures)


@pytest.mark.parametrize("logits", [torch.zeros(5, 100), torch.zeros(4, 99), torch.zeros(100, 4).T])
def test_logits_that_do_not_fit_are_refused(logits: Tensor) -> None:
    picker = TokenPicker(4, 100, DEVICE)
    with pytest.raises(ValueError, match="do not fit a picker for 4 rows of 100"):
        picker.pick_plain(logits, torch.zeros(len(logits)).double(), torch.ones(len(logits)), torch.zeros(5).int())
