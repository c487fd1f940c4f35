"""A page in headless Chromium, driven from Python through a small Node program."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from doubles_node import E2E, find_chromium, find_node, node_environment


class Browser:
    """The browser process. ``async with browser.page() as page`` opens a page in a context of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @asynccontextmanager
    async def page(self, **options: Any) -> AsyncIterator["Page"]:
        await self.call("open", options)
        yield Page(self)
        await self.call("leave")

    async def call(self, *command: Any) -> Any:
        """Run one command in the browser without holding up the event loop, which serves it."""
        reply = json.loads(await asyncio.to_thread(self._exchange, json.dumps(command)))
        assert "error" not in reply, reply["error"]
        return reply["result"]

    def _exchange(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the browser has ended"
        return line


class Page:
    """Calls methods of a playwright page by name: ``await page("click", "#send")``."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    async def __call__(self, method: str, *args: Any) -> Any:
        return await self._browser.call(method, *args)

    async def wait_for(self, condition: str, timeout_s: float = 20.0) -> None:
        """Wait until a JavaScript expression is true; polled from here, since the page's policy forbids eval."""
        deadline = time.monotonic() + timeout_s
        while not await self("evaluate", condition):
            assert time.monotonic() < deadline, f"still false: {condition}"
            await asyncio.sleep(0.02)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run headless Chromium."""
    command = [find_node(), str(E2E / "driver.cjs"), find_chromium()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=node_environment()) as process:
        yield Browser(process)
        process.communicate(timeout=30)
