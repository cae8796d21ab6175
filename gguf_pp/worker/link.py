"""The way from a session's last stage to the worker that has the next one."""

from collections.abc import Callable

from gguf_pp.errors import RemoteError
from gguf_pp.pipeline.credits import Outgoing
from gguf_pp.wire import Fields, Verb
from gguf_pp.worker.host import Host


def join(host: Host, body: Fields, lost: Callable[[RemoteError], None]) -> Outgoing:
    """Connect to where the body of LINK_OUT says; `lost` hears, once or more, that it is over.

    Raises RemoteError, ProtocolError.
    """
    where, port = body.text("host", 255), body.integer("port", 1, 65535)
    token = body.text("token", 64)
    if not host.forwards:
        raise RemoteError("this worker does not connect to others")
    channel, agreed = host.dial(where, port)
    link = Outgoing(channel, host.timeout_s, agreed.heartbeat_s, lost)
    try:
        # However long it shows signs of life, it must answer, or this session would never end.
        link.connection.request(
            Verb.JOIN, {"token": token}, doing="joining", timeout_s=host.timeout_s
        )
    except RemoteError:
        link.close()
        raise
    return link
