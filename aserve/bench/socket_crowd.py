"""Many raw WebSocket clients in a process of their own, which read everything and do nothing with it.

    python -m aserve.bench.socket_crowd PORT PATH COUNT [FIRST_MESSAGE]

Prints a line once all are connected and have sent their message; ends with its standard input. The clients live
apart so that the measured process pays for its own side of the sockets only.
"""

import asyncio
import os
import selectors
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

READY = "ready\n"
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@asynccontextmanager
async def crowd(port: int, path: str, count: int, first_message: str = "") -> AsyncIterator[None]:
    """Run the clients until the block ends; it starts when all have connected."""
    command = [sys.executable, "-m", "aserve.bench.socket_crowd", str(port), path, str(count), first_message]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != READY.encode():
            raise RuntimeError("the clients could not connect")
        yield
    finally:
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Connect, say so, and read."""
    port, path, count, first_message = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    clients = [_connect(port, path, first_message.encode()) for _ in range(count)]
    sys.stdout.write(READY)
    sys.stdout.flush()
    _read_all(clients)


def _connect(port: int, path: str, message: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(HANDSHAKE.format(path=path).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    if not head.startswith(b"HTTP/1.1 101"):
        raise SystemExit(f"no WebSocket at {path}: {head.decode()}")
    if message:
        client.sendall(bytes((0x81, 0xFE)) + len(message).to_bytes(2, "big") + bytes(4) + message)  # masked with zeros
    client.setblocking(False)
    return client


def _read_all(clients: list[socket.socket]) -> None:
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if not os.read(key.fd, 1 << 16):
                    selector.unregister(key.fileobj)


if __name__ == "__main__":
    main()
