"""The official Node client against a live server: its ``ResponsesWS``, and its resources over HTTP."""

import asyncio
import json
from typing import Any

from doubles_node import E2E, find_node, node_environment
from doubles_socket import MODEL, Live, in_loop, scripted_server

find_node()
KEY = "sk-node"


async def run_client(live: Live, script: str) -> Any:
    """Return what ``script`` prints as JSON."""
    process = await asyncio.create_subprocess_exec(
        find_node(),
        str(E2E / script),
        f"{live.http_url}/v1",
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
        result = await run_client(live, "responses_client.cjs")
    first, second = result["turns"]
    assert (first["text"], first["output"], first["status"]) == ("Hello", "Hello", "completed")
    assert (second["text"], second["status"]) == ("Bye", "completed")
    assert second["usage"]["input_tokens"] == len("say Hello\nHello\nsay Bye\n")
    assert "temperature" in json.dumps(result["error"])


@in_loop
async def test_the_node_client_gets_its_answers_over_http() -> None:
    async with scripted_server(api_key=KEY) as live:
        result = await run_client(live, "http_client.cjs")
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
