"""A page in headless Chromium, driven from Python through a small Node program."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from doubles_node import E2E, find_chromium, find_node, node_environment

LINE_LIMIT = 1 << 20


class Page:
    """Calls methods of a playwright page by name: ``await page("click", "#send")``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def __call__(self, method: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, *args]).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, "the browser has ended"
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["result"]

    async def wait_for(self, condition: str, timeout_s: float = 10.0) -> None:
        """Wait until a JavaScript expression is true; polled from here, since the page's policy forbids eval."""
        deadline = time.monotonic() + timeout_s
        while not await self("evaluate", condition):
            assert time.monotonic() < deadline, f"still false: {condition}"
            await asyncio.sleep(0.02)


@contextmanager
def browser_server() -> Iterator[str]:
    """Run headless Chromium and yield where it can be reached."""
    process = subprocess.Popen(
        [find_node(), str(E2E / "browser_server.cjs"), find_chromium()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=node_environment(),
    )
    with process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint, "Chromium did not start"
        yield endpoint
        process.communicate(timeout=20)


@asynccontextmanager
async def browser_page(endpoint: str, **options: Any) -> AsyncIterator[Page]:
    """Open a page in a context of its own with ``options``."""
    process = await asyncio.create_subprocess_exec(
        find_node(),
        str(E2E / "driver.cjs"),
        endpoint,
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=node_environment(),
        limit=LINE_LIMIT,
    )
    try:
        yield Page(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 20)
