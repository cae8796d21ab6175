"""What a session needs of the worker it is part of."""

from typing import TYPE_CHECKING, Protocol

from gguf_pp.net import Agreed, Channel
from gguf_pp.worker.lender import Lender
from gguf_pp.worker.store import Store

if TYPE_CHECKING:
    from gguf_pp.worker.session import Session


class Host(Protocol):
    """The worker, to its sessions. `timeout_s` is how long a client may be silent; with `forwards`
    it connects to other workers."""

    lender: Lender
    store: Store
    timeout_s: float
    forwards: bool

    def admit(self, session: "Session") -> None:
        """Give `session` a place for a model, once those that end have left; raises RemoteError if
        there is none."""
        ...

    def dial(self, host: str, port: int) -> tuple[Channel, Agreed]:
        """Connect to another worker. Raises RemoteError."""
        ...

    def offer_link(self, session: "Session") -> str:
        """A token by which another worker may find `session`."""
        ...

    def linked(self, token: str) -> "Session":
        """The session that waits for this token, once. Raises ProtocolError."""
        ...

    def withdraw_links(self, session: "Session") -> None:
        """Forget tokens for `session`."""
        ...
