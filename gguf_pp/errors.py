"""The exception tree. Everything here is the user's to fix; bugs stay assertions.

GgufPpError
├── ConfigError        two settings contradict each other, or one is out of range
├── FormatError        the file is not the GGUF it claims to be
├── UnsupportedError   a valid file that needs an architecture, type or tokenizer we lack
├── TemplateError      the chat template does not render
├── PlacementError     the model does not fit the devices as split
├── RequestError       one request cannot be served (prompt too long, unknown token id)
├── DownloadError      a known model could not be fetched or verified
└── RemoteError        a peer is unreachable, speaks another version, or went away
"""


class GgufPpError(Exception):
    """A failure that the user can act on; `hint` says how."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(GgufPpError):
    """Two settings contradict each other, or one is out of range."""


class FormatError(GgufPpError):
    """The file is not the GGUF that it claims to be."""


class UnsupportedError(GgufPpError):
    """A valid file that needs an architecture, block type or tokenizer we lack."""


class KernelError(GgufPpError):
    """Triton cannot compile or launch a kernel for a device."""


class TemplateError(GgufPpError):
    """The chat template does not compile or does not render."""


class PlacementError(GgufPpError):
    """The model does not fit the devices as split."""


class RequestError(GgufPpError):
    """One request cannot be served; others are not affected."""


class DownloadError(GgufPpError):
    """A known model could not be fetched, or is not what it should be."""


class RemoteError(GgufPpError):
    """A peer is unreachable, speaks another version, or went away."""


def in_short(exc: BaseException) -> str:
    """The first line of what went wrong: torch adds advice on where to look."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]
