"""The official Node client's ``ResponsesWS`` against a live server."""

import asyncio
import json

from doubles_node import E2E, find_node, node_environment
from doubles_socket import in_loop, scripted_server

find_node()


@in_loop
async def test_the_node_client_converses_over_its_websocket() -> None:
    environment = await asyncio.to_thread(node_environment)
    async with scripted_server(api_key="sk-node") as live:
        process = await asyncio.create_subprocess_exec(
            find_node(),
            str(E2E / "responses_client.cjs"),
            f"{live.http_url}/v1",
            "sk-node",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        output, errors = await asyncio.wait_for(process.communicate(), 50)
        assert process.returncode == 0, errors.decode()
    result = json.loads(output)
    first, second = result["turns"]
    assert (first["text"], first["output"], first["status"]) == ("Hello", "Hello", "completed")
    assert (second["text"], second["status"]) == ("Bye", "completed")
    assert second["usage"]["input_tokens"] == len("say Hello\nHello\nsay Bye\n")
    assert "temperature" in json.dumps(result["error"])
