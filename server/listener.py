"""The listening socket, opened before anything else so that a taken port costs no time."""

from __future__ import annotations

import errno
import os
import socket

from server.errors import UserError

BACKLOG = 2048
"""Connections that may wait while the server is busy or still importing."""
UNSENT_BYTES = 64 * 1024
"""What the kernel holds for a client beyond what it has sent: else megabytes, behind which a stalled reader hides."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`; port 0 takes a free one.

    SO_REUSEADDR lets a restart take over the port at once. The socket listens from here on, since two sockets with
    that option may both be bound as long as neither listens.

    Raises:
        UserError: the name is unknown, the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--host {host}: no such address ({error})") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(_explain(error, host, port)) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL to reach `listener` with from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another process; choose another with --port (0 picks a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} is not allowed for this user; choose one of 1024 or more with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; 0.0.0.0 listens on all of them"
    return f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}"
