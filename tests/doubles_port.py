"""A port for a server that is about to start, which nobody else is given meanwhile."""

import socket


def reserve_port() -> socket.socket:
    """Return a socket bound to a free port of 127.0.0.1, to be kept open as long as the port is wanted.

    It does not listen, and lets others that allow reuse, as servers do, listen there if they ask for it by number.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
