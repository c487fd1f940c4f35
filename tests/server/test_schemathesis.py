"""Schemathesis makes requests of the OpenAPI document: no answer is a server's error or unlike its description."""

import asyncio
import sys
from pathlib import Path

import pytest
import uvloop
from doubles_http import LIMITS, count_up, in_loop, live_server

COMMAND = str(Path(sys.executable).with_name("schemathesis"))
SHORT = type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"max_model_len": 256})
EXCLUDED = "positive_data_acceptance"  # rules between fields, as that best_of is n, cannot be said in a schema
KEY = "a-long-secret-key"


async def probe(folder: Path, *options: str, key: str | None = None) -> None:
    """Run every check but the excluded one on a live server."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    options += tuple(word for name, value in headers.items() for word in ("--header", f"{name}: {value}"))
    async with live_server(count_up, limits=SHORT, api_key=key, headers=headers) as live:
        process = await asyncio.create_subprocess_exec(
            COMMAND, "run", f"{live.url}/openapi.json", "--seed", "1", "--exclude-checks", EXCLUDED, *options,
            cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output[-8000:]
        assert "failed" not in output
        assert live.engine.metrics.num_generation_tokens > 0
        await live.until_idle(10)
        await live.check_alive()


@in_loop
async def test_examples_and_what_follows_from_their_answers(tmp_path: Path) -> None:
    await probe(tmp_path, "--phases", "examples,stateful", "--max-examples", "4")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("key", [None, KEY])
def test_every_phase(key: str | None, tmp_path: Path) -> None:
    uvloop.run(probe(tmp_path, "--max-examples", "30", key=key))
