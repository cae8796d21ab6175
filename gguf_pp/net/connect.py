"""From an address to a connection: dial, shake hands, speak frames."""

import ssl

from gguf_pp.errors import RemoteError
from gguf_pp.net.channel import dial
from gguf_pp.net.connection import Connection, Handler
from gguf_pp.net.handshake import Agreed, greet_server


def connect(
    host: str,
    port: int,
    handler: Handler,
    *,
    timeout_s: float,
    secret: bytes | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[Connection, Agreed]:
    """A connection with the worker at host:port, to be started. Raises RemoteError.

    `timeout_s` bounds reaching it, the handshake, and later its silence.
    """
    channel = dial(host, port, timeout_s, tls)
    try:
        agreed = greet_server(channel, secret, timeout_s)
    except RemoteError:
        channel.close()
        raise
    return Connection(channel, timeout_s, handler, heartbeat_s=agreed.heartbeat_s), agreed
