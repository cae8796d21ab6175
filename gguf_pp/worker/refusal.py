"""What a client is told of a request that cannot be done."""

from typing import Any

from gguf_pp.backend.base import OutOfMemory, is_out_of_memory
from gguf_pp.errors import (
    ConfigError,
    FormatError,
    GgufPpError,
    PlacementError,
    RemoteError,
    UnsupportedError,
)
from gguf_pp.wire import ProtocolError

_MAX_CHARS = 2000

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (ProtocolError, "protocol"),
    (FormatError, "model"),
    (UnsupportedError, "model"),
    (ConfigError, "config"),
    (PlacementError, "config"),
    (RemoteError, "unreachable"),
)


def refusal(exc: Exception) -> dict[str, Any]:
    """The body of ERROR; its kind is "internal" for what is a fault of ours."""
    body: dict[str, Any] = {"kind": _kind(exc), "message": shown(exc)}
    if isinstance(exc, GgufPpError) and exc.hint:
        body["hint"] = exc.hint
    if body["kind"] == "memory":
        numbers = exc if isinstance(exc, OutOfMemory) else OutOfMemory("cpu", "buffers", 0, 0)
        body |= {
            "device": numbers.device,
            "what": numbers.what,
            "asked_bytes": numbers.asked_bytes,
            "free_bytes": max(0, numbers.free_bytes),
        }
    return body


def shown(exc: BaseException) -> str:
    """Its message, or at least what it is."""
    return (str(exc) or type(exc).__name__)[:_MAX_CHARS]


def _kind(exc: Exception) -> str:
    if is_out_of_memory(exc):
        return "memory"
    return next((kind for error, kind in _KINDS if isinstance(exc, error)), "internal")
