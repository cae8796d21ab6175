"""Names of devices on other machines."""

import ipaddress
import re
from dataclasses import dataclass

from gguf_pp.errors import ConfigError

DEFAULT_PORT = 50052
"""Of llama.cpp's rpc-server too."""

_FORM = re.compile(
    r"(?:\[(?P<v6>[^]]*)\]|(?P<name>[^/:]*)):(?P<port>[0-9]{1,5})(?:/(?P<device>.*))?"
)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?(#[0-9]{1,2})?")
_SCHEMES = ("tcp://", "rpc://", "rpc:")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker, and `device` of it if one was named; `str()` is what `parse_endpoint` takes."""

    host: str
    port: int
    device: str | None = None

    def __str__(self) -> str:
        return f"tcp://{self.peer}" + (f"/{self.device}" if self.device else "")

    @property
    def peer(self) -> str:
        """host:port, of the worker as a whole."""
        return join_host(self.host, self.port)


def join_host(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_remote(name: str) -> bool:
    """Whether the name of a device means one elsewhere."""
    return name.startswith(_SCHEMES)


def parse_endpoint(text: str) -> Endpoint:
    """Read tcp://host:port, tcp://host:port/cpu:1, tcp://[::1]:50052 or rpc:host:port.

    Raises ConfigError.
    """
    scheme = next((s for s in _SCHEMES if text.startswith(s)), None)
    found = scheme and _FORM.fullmatch(text.removeprefix(scheme))
    if not found:
        raise ConfigError(
            f"{text!r} is not the address of a worker",
            hint=f"tcp://host:{DEFAULT_PORT}, tcp://host:{DEFAULT_PORT}/cpu:1, "
            f"or tcp://[::1]:{DEFAULT_PORT}",
        )
    v6, name, device = found["v6"], found["name"], found["device"] or None
    if v6 is None and not _NAME.fullmatch(name):
        raise ConfigError(f"{text!r}: {name!r} is not the name of a host")
    if v6 is not None and not _is_v6(v6):
        raise ConfigError(f"{text!r}: {v6!r} is not an IPv6 address")
    port = int(found["port"])
    if not 1 <= port <= 65535:
        raise ConfigError(f"{text!r}: port {port} is not from 1 to 65535")
    if device is not None and not _DEVICE.fullmatch(device):
        raise ConfigError(
            f"{text!r}: {device!r} is not a device", hint="such as cpu, cpu:1 or cuda:0"
        )
    return Endpoint(name if v6 is None else v6, port, device)


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
