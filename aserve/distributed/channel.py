"""Messages between two processes of one host, over a pair of connected sockets."""

import socket
import struct
import threading

SEND_TIMEOUT_S = 5.0  # a peer that reads nothing for so long counts as lost
_LENGTH = struct.Struct("<Q")


class Channel:
    """One end; a message is a string of bytes that arrives whole or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        timeout = struct.pack("@ll", *divmod(round(SEND_TIMEOUT_S * 1e6), 1_000_000))  # a timeval
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._send_lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send ``message``; raises OSError if the peer is gone or does not read."""
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Wait for the next message; None once the peer is gone."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(_LENGTH.unpack(head)[0])

    def close(self) -> None:
        """Close this end; the other receives nothing more. Idempotent."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes | None:
        data = bytearray(num_bytes)
        view, place = memoryview(data), 0
        while place < num_bytes:
            try:
                count = self._socket.recv_into(view[place:])
            except OSError:  # reset by a peer that was killed, or closed here
                count = 0
            if not count:
                return None
            place += count
        return bytes(data)
