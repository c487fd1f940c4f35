"""The official Node client against a live server: its ``ResponsesWS``, and its resources over HTTP."""

import asyncio
import json
import re
from typing import Any

from doubles_http import answer_by, live_server
from doubles_node import E2E, find_node, node_environment
from doubles_socket import MODEL, in_loop, scripted_server

find_node()
KEY = "sk-node"


async def run_client(url: str, script: str) -> Any:
    """Return what ``script`` prints as JSON."""
    process = await asyncio.create_subprocess_exec(
        find_node(),
        str(E2E / script),
        f"{url}/v1",
        KEY,
        MODEL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=await asyncio.to_thread(node_environment),
    )
    output, errors = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


@in_loop
async def test_the_node_client_converses_over_its_websocket() -> None:
    async with scripted_server(api_key=KEY) as live:
        result = await run_client(live.http_url, "responses_client.cjs")
    first, second = result["turns"]
    assert (first["text"], first["output"], first["status"]) == ("Hello", "Hello", "completed")
    assert (second["text"], second["status"]) == ("Bye", "completed")
    assert second["usage"]["input_tokens"] == len("say Hello\nHello\nsay Bye\n")
    assert "temperature" in json.dumps(result["error"])


@in_loop
async def test_the_node_client_gets_its_answers_over_http() -> None:
    async with scripted_server(api_key=KEY) as live:
        result = await run_client(live.http_url, "http_client.cjs")
    (choice,) = result["chat"]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
    usage = {"prompt_tokens": len("say Hello\n"), "completion_tokens": len("Hello") + 1}  # and the end
    assert result["chat"]["usage"].items() >= usage.items()
    streamed = result["streamed"]
    assert (streamed["text"], streamed["reasons"]) == ("Hello", ["stop"])
    assert streamed["usage"].items() >= usage.items()
    assert result["completion"]["choices"][0]["text"] == "Bye"
    error = result["error"]
    assert (error["kind"], error["status"], error["param"]) == ("BadRequestError", 400, "temperature")
    assert "temperature" in error["message"]


def look_convert_say(prompt: str) -> str:
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    assert results == ["21.5", "70.7"][: len(results)]
    return [
        '<tool_call>\n{"name": "read_sensor", "arguments": {"city": "Plze\u0148"}}\n</tool_call>',
        '<tool_call>\n{"name": "to_fahrenheit", "arguments": {"celsius": 21.5}}\n</tool_call>',
        "It is 70.7 degrees.",
    ][len(results)]


@in_loop
async def test_the_node_client_loops_with_tools() -> None:
    async with live_server(answer_by(look_convert_say), api_key=KEY) as live:
        result = await run_client(live.url, "tools_client.cjs")
    loop = {
        "called": [["read_sensor", {"city": "Plze\u0148"}], ["to_fahrenheit", {"celsius": 21.5}]],
        "said": "It is 70.7 degrees.",
    }
    assert result["socket"] == result["http"] == loop
    assert result["chat"] == [loop, loop]


@in_loop
async def test_the_node_client_reconnects_when_its_socket_is_too_old() -> None:
    async with scripted_server(api_key=KEY, max_connection_age_s=1.5) as live:
        result = await run_client(live.http_url, "reconnect_client.cjs")
    assert result == {"codes": [1001], "said": ["one", "two"]}
