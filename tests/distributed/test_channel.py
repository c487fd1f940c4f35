"""Messages arrive whole and in order, whatever their size, and the end of a peer is noticed on both sides."""

import socket
import threading

import pytest

from aserve.distributed.channel import Channel


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def test_messages_of_all_sizes_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    messages = [b"", b"a", bytes(range(256)), b"x" * 3_000_000, b"last"]  # one is far larger than a socket's buffer
    received: list[bytes | None] = []
    reader = threading.Thread(target=lambda: received.extend(ends[1].receive() for _ in range(len(messages) + 1)))
    reader.start()
    for message in messages:
        ends[0].send(message)
    ends[0].close()
    reader.join(10)
    assert received == [*messages, None]
    ends[1].close()


def test_messages_of_several_threads_do_not_mix(ends: tuple[Channel, Channel]) -> None:
    def send(letter: bytes) -> None:
        for _ in range(20):
            ends[0].send(letter * 50_000)

    threads = [threading.Thread(target=send, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    received = [ends[1].receive() for _ in range(60)]
    for thread in threads:
        thread.join()
    assert sorted(message[:1] for message in received if message) == [b"a"] * 20 + [b"b"] * 20 + [b"c"] * 20
    assert {len(set(message)) for message in received if message} == {1}
    for end in ends:
        end.close()


def test_a_peer_that_ends_within_a_message_has_sent_nothing(ends: tuple[Channel, Channel]) -> None:
    ends[0]._socket.sendall(b"\x08\0\0\0\0\0\0\0half")
    ends[0].close()
    assert ends[1].receive() is None
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        ends[1].send(b"anything")
    ends[1].close()


def test_a_peer_that_does_not_read_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.distributed.channel.SEND_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        with pytest.raises(BlockingIOError):
            channel.send(b"x" * 10_000_000)
        channel.close()
