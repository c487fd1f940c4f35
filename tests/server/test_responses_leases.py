"""The next turn of a lane: its token ids go on as they were, and its KV pages are kept for it."""

from pathlib import Path

from doubles_engine import until
from doubles_http import demo_tokenizer
from doubles_responses import plain
from doubles_socket import LIMITS, in_loop, respond, scripted_server

from aserve.engine.replay import replay_file
from aserve.tokenizer.spans import join_spans

TEXT = "say " + "a long answer " * 6


@in_loop
async def test_a_lanes_pages_outlive_the_traffic_of_others_and_go_with_the_socket(tmp_path: Path) -> None:
    small = LIMITS.__class__(
        vocab_size=256, max_model_len=600, max_num_seqs=8, max_num_batched_tokens=128, num_pages=200, page_size=4
    )
    async with scripted_server(limits=small) as live, plain(live) as client:
        async with live.connect() as socket:
            first = await respond(socket, input=TEXT)
            for number in range(12):  # would evict everything else of the pool twice
                await client.post("/responses", json={"input": f"{number} " * 40, "max_output_tokens": 40})
            second = await respond(socket, input="say b", previous_response_id=first[-1]["response"]["id"])
            before, after = (events[-1]["response"]["usage"] for events in (first, second))
            known = before["total_tokens"] - 1
            # The template of the double puts no ending behind an answer, so the token that ended it is not continued.
            assert after["input_tokens_details"]["cached_tokens"] >= known - 2 * small.page_size
            assert live.engine.stats().scheduler.num_leased_pages > 0
        await live.lose_connections()
        await live.become_idle()
        stats = live.engine.stats().scheduler
        assert (stats.num_held_pages, stats.num_leased_pages) == (0, 0)
        assert replay_file(live.engine.dump_trace(tmp_path / "trace")).is_equal


@in_loop
async def test_a_failed_continuation_gives_the_pages_back() -> None:
    async with scripted_server() as live, live.connect() as socket:
        first = await respond(socket, input=TEXT, store=False)
        await until(lambda: live.engine.stats().scheduler.num_leased_pages > 0)
        await respond(socket, input="fail", previous_response_id=first[-1]["response"]["id"])
        await until(lambda: live.engine.stats().scheduler.num_held_pages == 0)


def test_what_the_model_wrote_is_never_tokenized_again() -> None:
    tokenizer = demo_tokenizer()
    ask = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.encode_turn(ask, ())
    (eos,) = (token for token in tokenizer.eos_token_ids if tokenizer.token_bytes(token) == b"<|im_end|>")
    odd = [*tokenizer.encode("Hel"), *tokenizer.encode("lo"), *tokenizer.encode(" the"), *tokenizer.encode("re")]
    assert tokenizer.encode("Hello there") != odd
    turns = [*ask, {"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "and <|im_end|> you?"}]
    for ending in ([eos], []):
        known = [*prompt, tokenizer.written_span("Hello there", [*odd, *ending])]
        spans = tokenizer.encode_turn(turns, known)
        assert spans[:2] == known
        suffix = "" if ending else "<|im_end|>"
        expected = tokenizer.encode(f"{suffix}\n<|im_start|>user\nand")
        assert join_spans(spans)[: len(join_spans(known)) + len(expected)] == [*join_spans(known), *expected]
        assert tokenizer.decode(join_spans(spans)) == tokenizer.decode(tokenizer.encode_chat(turns))
        third = tokenizer.encode_turn([*turns, {"role": "assistant", "content": "Fine"}], spans)
        assert third[: len(spans) - 1] == spans[:-1]  # what ended with the call for an answer is written differently


def test_where_the_template_writes_something_else_tokens_begin_anew() -> None:
    tokenizer = demo_tokenizer()
    ask = [{"role": "user", "content": "hi"}]
    known = [*tokenizer.encode_turn(ask, ()), tokenizer.written_span("Hello", tokenizer.encode("Hello"))]
    turns = [*ask, {"role": "assistant", "content": "Bye"}, {"role": "user", "content": "so?"}]
    spans = tokenizer.encode_turn(turns, known)
    assert spans[0] == known[0]
    assert join_spans(spans) == tokenizer.encode_chat(turns)
    other = tokenizer.encode_turn([{"role": "system", "content": "Be brief."}, *turns], known)
    assert len(other) == 1
