"""Permission to send ubatches: as many at a time as the other side has copies for."""

import threading
from collections.abc import Callable

from gguf_pp.errors import RemoteError
from gguf_pp.net import Channel, Connection
from gguf_pp.wire import Frame, ProtocolError, Verb


class Credits:
    """Counts the free input copies of the other side."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n = 0
        self._failure: RemoteError | None = None

    def spend(self) -> None:
        """Wait for a free copy. Raises RemoteError once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._n > 0 or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            self._n -= 1

    def grant(self, n: int) -> None:
        """The other side has `n` more."""
        with self._changed:
            self._n += n
            self._changed.notify_all()

    def fail(self, error: RemoteError) -> None:
        """There will be no more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()


class Outgoing:
    """A worker's connection to the next one, which takes ubatches and returns credits."""

    def __init__(
        self,
        channel: Channel,
        timeout_s: float,
        heartbeat_s: float,
        tell: Callable[[RemoteError], None],
    ) -> None:
        """`tell` hears once or more that the connection is lost, before `submit` raises it."""
        self._credits = Credits()
        self._tell = tell
        self.connection = Connection(channel, timeout_s, self, heartbeat_s=heartbeat_s)
        self.connection.start()

    def submit(self, id_: int, meta: bytes, payload: memoryview) -> None:
        """Send a ubatch once there is a copy for it; returns when `payload` may change.

        Raises RemoteError.
        """
        try:
            self._credits.spend()
            self.connection.send(Verb.SUBMIT, id_, meta, payload, wait=True)
        except RemoteError as exc:
            self._tell(exc)
            raise

    def payload_for(self, frame: Frame) -> memoryview:
        """As in net.Handler."""
        raise ProtocolError(f"{frame.verb.name} with a payload")

    def handle(self, frame: Frame) -> None:
        """As in net.Handler."""
        if frame.verb is not Verb.CREDIT:
            raise ProtocolError(f"{frame.verb.name} over a link")
        self._credits.grant(frame.id)

    def lost(self, error: RemoteError) -> None:
        """As in net.Handler."""
        self._tell(error)
        self._credits.fail(error)

    def close(self) -> None:
        """End the connection."""
        self.connection.close()
