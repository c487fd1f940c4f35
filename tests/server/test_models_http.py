"""Model names are dictionary keys, never paths; tokenize and detokenize are inverse."""

import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from doubles_http import GRIN, MODEL, demo_tokenizer, in_loop, live_server
from doubles_tokenizer import make_tokenizer_with_bos
from openai.types import Model

from aserve import __version__

HOSTILE = ("../../etc/passwd", "/etc/passwd", "%2e%2e/x", "x" * 10_000, "\0", "scripted\0", "Scripted", "", " scripted")


@in_loop
async def test_the_served_model_is_listed() -> None:
    async with live_server() as live:
        listed = (await live.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        (model,) = [Model.model_validate(one, strict=True) for one in listed["data"]]
        assert (model.id, model.owned_by) == (MODEL, "aserve")
        assert listed["data"][0]["max_model_len"] == 8192
        assert (await live.http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
        assert (await live.http.get("/version")).json() == {"version": __version__}


@in_loop
async def test_a_model_with_slashes_in_its_name_is_found() -> None:
    async with live_server(engine={}) as live:
        object.__setattr__(live.engine._parts, "model_name", "org/name")
        assert (await live.http.get("/v1/models/org/name")).json()["id"] == "org/name"
        assert (await live.chat(model="org/name", max_tokens=1)).json()["model"] == "org/name"


@in_loop
async def test_hostile_names_open_no_file_and_are_not_repeated() -> None:
    opened: list[str] = []
    is_watching = False

    def watch(event: str, arguments: Any) -> None:
        if is_watching and event in ("open", "os.listdir", "os.scandir"):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    async with live_server() as live:
        await live.check_alive()
        is_watching = True
        for name in HOSTILE:
            for stream in (False, True):
                for answer in (
                    await live.chat(model=name, stream=stream),
                    await live.complete(model=name, stream=stream),
                    await live.post("/tokenize", prompt="a", model=name),
                ):
                    assert answer.status_code == 404
                    assert answer.json()["error"]["code"] == "model_not_found"
                    assert answer.json()["error"]["param"] == "model"
                    assert "passwd" not in answer.text
                    assert len(answer.text) < 300
            assert (await live.http.get(f"/v1/models/{quote(name, safe='')}")).status_code in (400, 404)
        is_watching = False
        assert opened == []


@in_loop
async def test_a_missing_model_is_the_served_one() -> None:
    async with live_server() as live:
        for fields in ({}, {"model": None}, {"model": MODEL}):
            assert (await live.chat(max_tokens=1, **fields)).json()["model"] == MODEL


@in_loop
async def test_tokenize_and_detokenize() -> None:
    async with live_server() as live:
        text = "Žluťoučký 😀\n"
        answer = (await live.post("/tokenize", prompt=text)).json()
        assert answer["tokens"] == demo_tokenizer().encode(text)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 8192
        assert (await live.post("/detokenize", tokens=answer["tokens"])).json() == {"prompt": text}
        assert (await live.post("/detokenize", tokens=[])).json() == {"prompt": ""}
        chat = (await live.post("/tokenize", messages=[{"role": "user", "content": "hi"}])).json()
        assert chat["count"] == 31
        assert (await live.post("/tokenize", prompt="")).json()["tokens"] == []
        named = (await live.post("/tokenize", prompt="hi😀", return_token_strs=True)).json()
        assert named["tokens"] == [6004, *GRIN]
        assert named["token_strs"] == ["hi", "\\xf0\\x9f", "\\x98", "\\x80"]


@in_loop
async def test_what_is_tokenized_is_what_would_be_generated_from() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    open_turn: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    async with live_server() as live:
        for fields in ({}, open_turn, {"chat_template_kwargs": {"enable_thinking": False}}):
            counted = (await live.post("/tokenize", messages=turns, **fields)).json()
            used = (await live.post("/v1/chat/completions", messages=turns, max_tokens=1, **fields)).json()["usage"]
            assert counted["count"] == used["prompt_tokens"]
        refused = await live.post("/tokenize", messages=turns, add_generation_prompt=False)
        assert refused.json()["error"]["param"] == "add_generation_prompt"


@in_loop
async def test_bos_is_added_to_a_prompt_unless_it_is_not_wanted(tmp_path: Path) -> None:
    async with live_server(tokenizer=make_tokenizer_with_bos(tmp_path, None)) as live:
        with_bos = (await live.post("/tokenize", prompt="the quick")).json()["tokens"]
        without = (await live.post("/tokenize", prompt="the quick", add_special_tokens=False)).json()["tokens"]
        assert with_bos == [1, *without]
        assert 1 not in without


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 8193}, "tokens"),
    ],
)
@in_loop
async def test_wrong_bodies_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    async with live_server() as live:
        answer = await live.post(path, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@in_loop
async def test_metrics_name_requests_pages_and_loop_lag() -> None:
    async with live_server() as live:
        await live.chat(max_tokens=3)
        text = (await live.http.get("/metrics")).text
        for name in (
            "aserve_request_success_total",
            "aserve_generation_tokens_total",
            "aserve_time_to_first_token_seconds_bucket",
            "aserve_loop_lag_seconds_bucket",
            "aserve_loop_lag_p99_seconds",
            "aserve_kv_pages_free",
        ):
            assert f"\n{name}{{" in text, name
