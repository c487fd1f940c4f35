"""What is refused at the door, and with what words."""

import pytest
from doubles_scheduler import StepLoop, make_limits, make_request

from aserve.errors import CapacityError, ClientError, ConfigError
from aserve.scheduler.scheduler import Scheduler


def make_scheduler(max_queued_requests: int = 4, policy: str = "fcfs", **limits: float) -> Scheduler:
    return Scheduler(
        make_limits(**limits), eos_token_ids=frozenset(), policy=policy, max_queued_requests=max_queued_requests
    )


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"max_model_len": 20}, 20),
        ({"num_pages": 5}, 20),  # 5 pages of 4 tokens
        ({"num_pages": 5, "max_model_len": 10}, 10),
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 1, None])
def test_the_longest_prompt_runs_and_one_more_token_is_refused(limits, room, max_tokens) -> None:
    """A prompt that is only scored may fill all of the room, another leaves a place for a token of output."""
    loop = StepLoop(make_limits(**limits))
    longest = room if max_tokens == 0 else room - 1
    loop.add(make_request("fits", [1] * longest, max_tokens=max_tokens))
    with pytest.raises(ClientError, match=f"{longest + 1} tokens") as refusal:
        loop.add(make_request("too long", [1] * (longest + 1), max_tokens=max_tokens))
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt")
    loop.run()
    loop.check_outcomes()


@pytest.mark.parametrize("prompt", [[], [50], [-1], [1, 2**63], [3, -5, 4]])
def test_empty_prompts_and_unknown_tokens_are_refused(prompt: list[int]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(ClientError) as refusal:
        scheduler.add(make_request("bad", prompt))
    assert refusal.value.param == "prompt"
    assert not scheduler.has_unfinished


def test_unknown_tokens_in_parameters_are_refused() -> None:
    with pytest.raises(ClientError, match="stop_token_ids"):
        make_scheduler().add(make_request("bad", [1], stop_token_ids=(50,)))


def test_the_queue_has_an_end() -> None:
    scheduler = make_scheduler(max_queued_requests=2)
    for number in range(2):
        scheduler.add(make_request(f"r{number}", [1]))
    with pytest.raises(CapacityError) as refusal:
        scheduler.add(make_request("r2", [1]))
    assert refusal.value.status == 503
    assert scheduler.num_waiting == 2
    scheduler.schedule()  # both start
    scheduler.add(make_request("r2", [1]))


def test_an_id_is_unique_while_its_request_is_open() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("same", [1]))
    with pytest.raises(ClientError, match="in use"):
        scheduler.add(make_request("same", [2]))
    scheduler.abort("same")
    scheduler.add(make_request("same", [2]))


def test_an_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="fcfs, priority"):
        make_scheduler(policy="lottery")


def test_seeds() -> None:
    """Given seeds arrive as unsigned 64 bits; none means fresh entropy for each request."""
    fresh = iter((111, 222))
    scheduler = Scheduler(make_limits(), eos_token_ids=frozenset(), fresh_seed=lambda: next(fresh))
    for number, seed in enumerate((0, -1, 2**63 - 1, -(2**63), 2**64 - 1, None, None)):
        scheduler.add(make_request(f"r{number}", [1], seed=seed))
    seeds = [start.seed for start in scheduler.schedule().row_starts]
    assert seeds == [0, 2**64 - 1, 2**63 - 1, 2**63, 2**64 - 1, 111, 222]


def test_missing_seeds_differ_by_default() -> None:
    scheduler = make_scheduler(max_queued_requests=9)
    for number in range(5):
        scheduler.add(make_request(f"r{number}", [1], seed=None))
    seeds = {start.seed for start in scheduler.schedule().row_starts}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**64 for seed in seeds)
