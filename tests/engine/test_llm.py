"""The synchronous facade, in a plain script and inside a running loop."""

import threading

import pytest
from doubles_engine import LIMITS, LetterTokenizer, ScriptedRunner, letters

from aserve.config import EngineConfig
from aserve.engine.llm import LLM
from aserve.errors import ConfigError, EngineDeadError
from aserve.request import FinishReason, SamplingParams


def make_llm(runner=None, **settings):
    runner = runner or ScriptedRunner(LIMITS, letters)
    return LLM(runner=runner, tokenizer=LetterTokenizer(), **settings)


def test_a_list_of_prompts_comes_back_in_order():
    prompts = [chr(97 + number % 20) * (1 + number % 9) for number in range(100)]
    with make_llm() as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5, logprobs=1))
        alone = [llm.generate(prompt, SamplingParams(max_tokens=5))[0] for prompt in prompts[:5]]
    assert [output.num_prompt_tokens for output in outputs] == [len(prompt) for prompt in prompts]
    assert [output.text for output in outputs[:5]] == [output.text for output in alone]
    for output in outputs:
        assert output.finish_reason is FinishReason.LENGTH
        assert output.error is None
        assert len(output.token_ids) == len(output.logprobs) == output.num_output_tokens == len(output.text) == 5
        assert [entry.token_id for entry in output.logprobs] == output.token_ids


def test_more_prompts_than_the_queue_takes():
    with make_llm(max_queued_requests=2) as llm:
        outputs = llm.generate(["abc"] * 50, SamplingParams(max_tokens=3))
    assert {output.error for output in outputs} == {None}


def test_parameters_for_each_prompt_and_every_kind_of_prompt():
    with make_llm() as llm:
        prompts = ["ab\n", [97, 98, 10], [{"role": "user", "content": "ab"}]]
        outputs = llm.generate(prompts, [SamplingParams(max_tokens=count) for count in (1, 2, 3)])
        assert [output.num_output_tokens for output in outputs] == [1, 2, 3]
        assert outputs[2].text.startswith(outputs[1].text)
        with pytest.raises(ValueError, match="3 prompts, but 1"):
            llm.generate(prompts, [SamplingParams()])
        assert llm.generate([]) == []


def test_a_refused_prompt_has_an_error_and_the_others_do_not():
    with make_llm() as llm:
        good, bad, also_good = llm.generate(["abc", "", "abc"], SamplingParams(max_tokens=2))
    assert (bad.finish_reason, bad.text, bad.error) == (FinishReason.ERROR, "", "the prompt has no tokens")
    assert good.text == also_good.text
    assert good.error is None


async def test_it_works_inside_a_running_loop():
    with make_llm() as llm:
        assert len(llm.generate(["abc"], SamplingParams(max_tokens=4))[0].text) == 4


def test_closing_leaves_no_thread_and_may_be_repeated():
    before = set(threading.enumerate())
    llm = make_llm()
    llm.generate(["abc"], SamplingParams(max_tokens=4))
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate(["abc"])
    for thread in set(threading.enumerate()) - before:
        thread.join(1.0)  # it has said that it is done, and may not have left yet
    assert set(threading.enumerate()) <= before


def test_a_failing_start_says_why_and_leaves_no_thread():
    class ColdRunner(ScriptedRunner):
        def warm_up(self):
            raise ConfigError("no memory for a single page")

    before = set(threading.enumerate())
    runner = ColdRunner(LIMITS, letters)
    with pytest.raises(ConfigError, match="single page"):
        make_llm(runner)
    assert runner.is_closed
    assert {thread for thread in threading.enumerate() if thread.name == "aserve-llm"} <= before


def test_an_engine_that_fails_gives_errors_not_a_hang():
    runner = ScriptedRunner(LIMITS, letters)
    runner.fail_step(3, RuntimeError("gone"))
    with make_llm(runner, trace_file="/dev/null/trace") as llm:
        outputs = llm.generate(["abc"] * 20)
    assert all("gone" in output.error or "failed" in output.error for output in outputs)


@pytest.mark.parametrize(
    ("arguments", "settings", "word"),
    [
        ((), {"no_such_setting": 1}, "no_such_setting"),
        ((), {"page_size": "16"}, "page_size"),
        ((EngineConfig(),), {"page_size": 16}, "EngineConfig"),
    ],
)
def test_wrong_settings_are_refused(arguments, settings, word):
    with pytest.raises(ConfigError, match=word):
        LLM(*arguments, **settings)
