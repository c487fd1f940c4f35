"""Top-k, top-p and min-p by kernel: on a GPU if there is one, else under Triton's interpreter."""

import numpy as np
import pytest
import torch
from doubles_sampling import CASES, assert_inverts_cdf, filters, kept_by_transformers
from torch import Tensor

from aserve.sampling.draw import FilterValues, find_limit
from aserve.sampling.gpu import limit_kernel
from aserve.sampling.gpu.token_picker import TokenPicker

pytestmark = pytest.mark.filterwarnings("ignore:(.* encountered in|All-NaN slice):RuntimeWarning")  # of numpy
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Row = tuple[int, float, float]


def columns(cases: list[Row]) -> FilterValues:
    return FilterValues(
        *(torch.tensor(column, dtype=torch.float32, device=DEVICE) for column in zip(*cases, strict=True))
    )


def find(logits: Tensor, cases: list[Row], temperature: float = 1.0) -> Tensor:
    """Return the limits [N] of the rows of ``logits``."""
    picker = TokenPicker(len(cases), logits.shape[1], DEVICE)
    temperatures = torch.full((len(cases),), temperature, device=DEVICE)
    return picker.find_limits(logits.to(DEVICE), temperatures, columns(cases)).cpu()


def find_by_sort(logits: Tensor, cases: list[Row], temperature: float = 1.0) -> Tensor:
    """What the torch path finds, which is tested against transformers."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    return find_limit(scaled, filters(*map(list, zip(*cases, strict=True))))  # type: ignore[arg-type]


@pytest.fixture(params=["candidates", "pivots"])
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates fit, or passes against pivots must close in first."""
    if request.param == "pivots":
        monkeypatch.setattr(limit_kernel, "CAPACITY", 32)


@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize(("spread", "temperature"), [(0.1, 1.0), (1.0, 0.7), (4.0, 2.0)])
def test_each_filter_keeps_what_transformers_keeps(spread: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(CASES), 4000, generator=generator) * spread + 1
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    kept = scaled >= find(logits, CASES, temperature).unsqueeze(1)
    for i, case in enumerate(CASES):
        assert torch.equal(kept[i], kept_by_transformers(logits[i] / temperature, *case)), case


@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
def test_logits_of_any_magnitude_have_the_limit_of_a_sort(scale: float) -> None:
    """On both sides of 0, magnitudes far apart in one row."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 600, generator=generator) * torch.logspace(-6, 0, 600) * scale
    cases = [(5, 1.0, 0.0), (300, 1.0, 0.0), (599, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.97, 0.0), (200, 0.8, 0.3)]
    assert torch.equal(find(logits, cases), find_by_sort(logits, cases))


@pytest.mark.usefixtures("_route")
def test_ties_at_a_limit_all_stay() -> None:
    """Few different values, then only one: more equal logits than there is room for."""
    generator = torch.Generator().manual_seed(2)
    cases = [(2, 1.0, 0.0), (90, 1.0, 0.0), (0, 0.4, 0.0), (0, 0.999, 0.0), (30, 0.5, 0.0), (0, 1.0, 0.5)]
    logits = torch.randint(-2, 3, (6, 700), generator=generator).float()
    for values in (logits, torch.zeros(6, 700), torch.full((6, 700), -3.0)):
        assert torch.equal(find(values, cases), find_by_sort(values, cases))


@pytest.mark.usefixtures("_route")
def test_masked_tokens_do_not_count() -> None:
    """A grammar or a ban leaves minus infinities; a top_k of more than what is left keeps all that is left."""
    logits = torch.full((5, 900), -torch.inf)
    logits[:, 100:220] = torch.linspace(-3, 3, 120)
    cases = [(5, 1.0, 0.0), (120, 1.0, 0.0), (121, 1.0, 0.0), (500, 0.9, 0.0), (0, 0.9, 0.0)]
    limits = find(logits, cases)
    assert torch.equal(limits, find_by_sort(logits, cases))
    assert limits[2] == -torch.inf


def test_a_row_alone_has_the_limit_it_has_in_a_batch() -> None:
    logits = torch.randn(len(CASES), 3000, generator=torch.Generator().manual_seed(3))
    together = find(logits, CASES)
    for i, case in enumerate(CASES):
        assert find(logits[i : i + 1], [case])[0] == together[i]


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 100.0])
def test_filtered_picks_invert_the_distribution_that_is_left(temperature: float) -> None:
    """Both ends of it too; a greedy row takes the best, whatever its filters."""
    generator = torch.Generator().manual_seed(4)
    cases = [*CASES, (7, 0.5, 0.1), (1, 0.1, 1.0)]
    logits = torch.randn(len(cases), 2500, generator=generator) * 3
    uniforms = torch.rand(len(cases), dtype=torch.float64, generator=generator)
    uniforms[:3], uniforms[3:6] = 0.0, 1 - 2.0**-53
    temperatures = torch.full((len(cases),), temperature)
    temperatures[-2:] = 0.0
    kept = np.stack(
        [kept_by_transformers(row / temperature, *case).numpy() for row, case in zip(logits, cases, strict=True)]
    )
    token_ids = torch.empty(len(cases), dtype=torch.int32, device=DEVICE)
    TokenPicker(15, 2500, DEVICE).pick_filtered(
        logits.to(DEVICE), uniforms.to(DEVICE), temperatures.to(DEVICE), columns(cases), token_ids
    )
    assert all(kept[i, token_id] for i, token_id in enumerate(token_ids.tolist()[:-2]))
    assert_inverts_cdf(token_ids.cpu(), logits, uniforms, temperatures, kept)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    cases = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (9, 0.5, 0.0)]
    logits = torch.randn(5, 2500, generator=torch.Generator().manual_seed(5))
    uniforms, picker = torch.full((5,), 0.6, dtype=torch.float64, device=DEVICE), TokenPicker(5, 2500, DEVICE)

    def pick(values: Tensor, temperatures: Tensor) -> list[int]:
        token_ids = torch.empty(5, dtype=torch.int32, device=DEVICE)
        picker.pick_filtered(values.to(DEVICE), uniforms, temperatures.to(DEVICE), columns(cases), token_ids)
        result: list[int] = token_ids.tolist()
        return result

    for temperatures in (torch.ones(5), torch.zeros(5)):
        expected = pick(logits, temperatures)
        for place in (0, 4):
            hurt = logits.clone()
            hurt[place, 2100] = bad
            assert pick(hurt, temperatures) == [-1 if i == place else expected[i] for i in range(5)]
