"""The chat page in headless Chromium, against a live server with a scripted engine."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from doubles_browser import Browser, Page, running_browser
from doubles_node import find_chromium, find_node
from doubles_socket import LIMITS, Live, in_loop, live_server, obey, scripted_engine, scripted_server

find_node()
find_chromium()

CONNECTED = "document.querySelector('#connection').dataset.state === 'connected'"
IDLE = "!document.querySelector('.running')"
LOG_FRAMES = """
window.frames_sent = [];
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (data) { window.frames_sent.push(JSON.parse(data)); return send.call(this, data); };
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


async def open_chat(page: Page, live: Live) -> None:
    await page("addInitScript", LOG_FRAMES)
    await page("goto", live.http_url + "/")
    await page.wait_for(CONNECTED)


async def say(page: Page, text: str) -> None:
    await page("fill", "#prompt", text)
    await page("press", "#prompt", "Enter")


async def ask(page: Page, text: str) -> str:
    """Send a message and return the whole answer."""
    await say(page, text)
    await page.wait_for(IDLE)
    return await answer(page)


async def answer(page: Page) -> str:
    return await page("evaluate", "[...document.querySelectorAll('.assistant .body')].at(-1)?.textContent ?? ''")


async def sent(page: Page) -> list[dict[str, Any]]:
    return await page("evaluate", "window.frames_sent")


@in_loop
async def test_text_grows_while_it_streams_and_the_speed_is_shown(browser: Browser) -> None:
    spoken = "a long answer " * 40
    async with scripted_server(step_time_s=0.005) as live, browser.page() as page:
        await open_chat(page, live)
        assert await page("textContent", "#model") == "scripted"
        times = [time.monotonic()]
        await say(page, f"say {spoken}.")
        for length in (0, len(spoken) // 4, 3 * len(spoken) // 4):
            await page.wait_for(f"(document.querySelector('.assistant .body')?.textContent.length ?? 0) > {length}")
            times.append(time.monotonic())
            assert len(await answer(page)) < len(spoken)
        await page.wait_for(IDLE)
        times.append(time.monotonic())
        assert await answer(page) == f"{spoken}."
        stats = await page("textContent", ".stats")
        assert "tokens/s" in stats
        assert "first token" in stats
        assert f"{len(spoken) + 2} tokens" in stats  # one a letter, and the one that ended it
        speed, num_behind_first = float(stats.split()[0]), len(spoken) + 1
        assert num_behind_first / (times[-1] - times[0]) - 0.1 < speed < num_behind_first / (times[-2] - times[1]) + 0.1
        assert await page("problems") == []


@in_loop
async def test_thoughts_are_open_while_the_model_thinks_and_folded_behind_its_answer(browser: Browser) -> None:
    thought = ("first this, then that " * 8).strip()
    async with scripted_server(step_time_s=0.005, reasoning_parser="think") as live, browser.page() as page:
        await open_chat(page, live)
        await say(page, f"say <think>{thought}</think>Done.")
        await page.wait_for("document.querySelector('.thoughts[open] summary')?.textContent === 'Thinking'")
        assert await answer(page) == ""
        await page.wait_for(IDLE)
        assert await answer(page) == "Done."
        assert await page("textContent", ".thoughts div") == thought
        assert await page("evaluate", "document.querySelector('.thoughts').open") is False
        assert await page("textContent", ".thoughts summary") == "Thoughts"
        await ask(page, "say <think>only a thought.")
        assert await page("evaluate", "[...document.querySelectorAll('.thoughts')].at(-1).open") is True
        assert await page("problems") == []


@in_loop
async def test_stop_ends_the_answer_on_the_server_and_the_conversation_goes_on(browser: Browser) -> None:
    async with scripted_server(step_time_s=0.005) as live, browser.page() as page:
        await open_chat(page, live)
        await say(page, "count")
        await page.wait_for("document.querySelectorAll('.assistant .body')[0]?.textContent.length > 5")
        await page("click", "#stop")
        await page.wait_for(IDLE)
        await live.become_idle()
        text = await answer(page)
        assert len(text) > 5
        assert "stopped" in await page("textContent", ".stats")
        assert await ask(page, "say again") == "again"
        first, cancel, second = await sent(page)
        assert (first["previous_response_id"], cancel["type"]) == (None, "response.cancel")
        assert second["previous_response_id"].startswith("resp_")
        assert [item["content"] for item in second["input"]] == ["say again"]
        assert await answer(page) == "again"


@in_loop
async def test_stop_falls_back_to_leaving_the_socket(browser: Browser) -> None:
    drop_cancel = LOG_FRAMES.replace("return send", "if (data.includes('response.cancel')) return; return send")
    async with scripted_server(step_time_s=0.005) as live, browser.page() as page:
        await page("addInitScript", drop_cancel)
        await page("goto", live.http_url + "/")
        await page.wait_for(CONNECTED)
        await say(page, "count")
        await page.wait_for("document.querySelectorAll('.assistant .body')[0]?.textContent.length > 5")
        await page("click", "#stop")
        await page.wait_for(IDLE)
        await live.become_idle()
        assert await ask(page, "say again") == "again"


@in_loop
async def test_a_second_turn_continues_and_a_new_chat_does_not(browser: Browser) -> None:
    prompts = []

    def script(tokens: Any, position: int) -> int:
        prompts.append("".join(map(chr, tokens[:position])))
        return obey(tokens, position)  # type: ignore[return-value]

    async with scripted_server(script) as live, browser.page() as page:
        await open_chat(page, live)
        assert await ask(page, "say one") == "one"
        prompts.clear()
        assert await ask(page, "say two") == "two"
        assert prompts[0] == "say one\none\nsay two\n"
        await page("click", "#new-chat")
        assert await page("isVisible", "#welcome")
        assert await page("evaluate", "document.querySelectorAll('.message').length") == 0
        prompts.clear()
        await page("click", "#settings-toggle")
        await page("fill", "#instructions", "be kind")
        await page("fill", "#temperature", "0.5")
        assert await ask(page, "say three") == "three"
        assert prompts[0] == "be kind\nsay three\n"
        assert (await sent(page))[-1]["temperature"] == 0.5


@in_loop
async def test_a_new_chat_while_an_answer_runs_stops_it(browser: Browser) -> None:
    async with scripted_server(step_time_s=0.005) as live, browser.page() as page:
        await open_chat(page, live)
        await say(page, "count")
        await page.wait_for("document.querySelectorAll('.assistant .body')[0]?.textContent.length > 5")
        await page("click", "#new-chat")
        await live.become_idle()
        await page.wait_for(CONNECTED)
        assert await ask(page, "say fresh") == "fresh"
        assert await page("evaluate", "document.querySelectorAll('.message').length") == 2


@in_loop
async def test_the_whole_history_is_sent_when_the_server_has_forgotten_or_was_restarted(browser: Browser) -> None:
    async with scripted_engine() as engine, browser.page() as page:
        async with live_server(engine) as live:
            port = live.port
            await open_chat(page, live)
            assert await ask(page, "say one") == "one"
            (session,) = live.state._connections
            session._lanes[None].latest = None  # type: ignore[attr-defined]
            assert await ask(page, "say two") == "two"
            assert [item["content"] for item in (await sent(page))[-1]["input"]] == ["say one", "one", "say two"]
        await page.wait_for(f"!({CONNECTED})")
        async with live_server(engine, port=port):
            await page.wait_for(CONNECTED)
            assert await ask(page, "say three") == "three"
            last = (await sent(page))[-1]
            assert last["previous_response_id"] is None
            assert len(last["input"]) == 5
            assert await ask(page, "say four") == "four"
            assert len((await sent(page))[-1]["input"]) == 1


@in_loop
async def test_an_old_connection_is_replaced_and_a_turn_on_it_is_sent_again(browser: Browser) -> None:
    async with scripted_server(max_connection_age_s=1.0) as live, browser.page() as page:
        await open_chat(page, live)
        assert await ask(page, "say one") == "one"
        await asyncio.sleep(1.2)
        assert await ask(page, "say two") == "two"


@in_loop
async def test_text_is_shown_as_text_and_code_as_code(browser: Browser) -> None:
    html = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>"
    async with scripted_server() as live, browser.page() as page:
        await open_chat(page, live)
        assert await ask(page, f"say {html} `x < 1`") == html + " x < 1"
        assert await page("evaluate", "document.querySelectorAll('#messages img, #messages b').length") == 0
        assert await page("textContent", ".assistant code") == "x < 1"
        assert await page("title") == "aserve chat"
        assert await page("problems") == []


CODE = "import os\n\n<b>no</b>"


@in_loop
async def test_fenced_code_is_a_block(browser: Browser) -> None:
    def script(tokens: Any, position: int) -> int:
        text = f"Look:\n```python\n{CODE}\n```\nDone."
        spoken = position - len("show\n")
        return ord(text[spoken]) if spoken < len(text) else 2

    async with scripted_server(script) as live, browser.page() as page:
        await open_chat(page, live)
        await ask(page, "show")
        assert await page("textContent", ".assistant pre code") == CODE
        assert (await answer(page)) == f"Look:{CODE}Done."


@in_loop
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_shows_everything_without_scrolling_sideways(browser: Browser, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 640}, "colorScheme": scheme, "hasTouch": True}
    async with scripted_server() as live, browser.page(**phone) as page:
        await open_chat(page, live)
        await ask(page, "say " + "w" * 300 + " `" + "c" * 300 + "`")
        await page("click", "#settings-toggle")
        for selector in ("#send", "#prompt", "#new-chat", "#settings-toggle", "#temperature"):
            left, right = await page(
                "evaluate",
                f"(({{left, right}}) => [left, right])(document.querySelector('{selector}').getBoundingClientRect())",
            )
            assert 0 <= left < right <= 360, selector
        assert await page("evaluate", "document.documentElement.scrollWidth") == 360
        assert await page("evaluate", "document.querySelector('#messages').scrollWidth") <= 360
        red = await page("evaluate", "+getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (red > 200) == (scheme == "light")


@in_loop
async def test_the_keyboard_sends_and_breaks_lines_and_every_control_has_a_name(browser: Browser) -> None:
    async with scripted_server() as live, browser.page() as page:
        await open_chat(page, live)
        await page("focus", "#prompt")
        assert await page("isDisabled", "#send")
        await page("type", "#prompt", "say")
        await page("press", "#prompt", "Shift+Enter")
        await page("type", "#prompt", "say more")
        assert await page("inputValue", "#prompt") == "say\nsay more"
        await page("press", "#prompt", "Enter")
        await page.wait_for("document.querySelector('.assistant') && " + IDLE)
        assert await page("inputValue", "#prompt") == ""
        assert (await sent(page))[-1]["input"][0]["content"] == "say\nsay more"
        unnamed = await page(
            "evaluate",
            "[...document.querySelectorAll('button, input, textarea')].filter((control) =>"
            " !(control.labels?.length || control.ariaLabel || control.textContent.trim())).map(({id}) => id)",
        )
        assert unnamed == []


@in_loop
async def test_errors_are_shown_and_the_next_message_works(browser: Browser) -> None:
    async with scripted_server() as live, browser.page() as page:
        await open_chat(page, live)
        await ask(page, "fail")
        assert await page("textContent", "#error") == "this row cannot be sampled"
        assert await page("isVisible", "#error")
        assert await ask(page, "x" * (LIMITS.max_model_len + 1)) == await answer(page)
        assert "context" in await page("textContent", "#error")
        assert await ask(page, "say fine") == "fine"
        assert not await page("isVisible", "#error")


@in_loop
async def test_a_key_is_asked_for_only_where_one_is_needed_and_kept_in_the_tab(browser: Browser) -> None:
    async with scripted_server(api_key="sk-right") as live, browser.page() as page:
        await page("addInitScript", LOG_FRAMES)
        await page("goto", live.http_url + "/")
        await page.wait_for("!document.querySelector('#key-form').hidden")
        await page("fill", "#api-key", "sk-wrong")
        await page("press", "#api-key", "Enter")
        await page.wait_for("document.querySelector('#key-note').textContent.includes('did not accept')")
        await page("fill", "#api-key", "sk-right")
        await page("press", "#api-key", "Enter")
        await page.wait_for(CONNECTED)
        assert not await page("isVisible", "#key-form")
        assert await ask(page, "say in") == "in"
        assert await page("evaluate", "localStorage.length") == 0
        await page("reload")
        await page.wait_for(CONNECTED)
