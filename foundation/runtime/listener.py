"""Listening sockets of HTTP servers."""

import socket
from ipaddress import ip_address

from gristmill.foundation.errors import InputError


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises InputError if that cannot be, such as for a port in use.

    It listens before the server runs, so that a request right after the address is printed waits."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except (OSError, OverflowError) as error:
        raise InputError(f"{host}:{port}: cannot listen here ({error}); choose another --port or --host") from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
