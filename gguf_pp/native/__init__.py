"""C kernels of the CPU, and whether they are there. No torch."""

import importlib
import os
from types import ModuleType
from typing import Literal, Protocol, cast

from gguf_pp.errors import ConfigError

Choice = Literal["auto", "native", "torch"]


class Team(Protocol):
    """Threads that share the work of one device's kernels; used from one thread at a time.

    Its helpers run on the cores that the thread which starts the team may run on.
    """

    @property
    def n_threads(self) -> int:
        """Members, the calling thread included."""

    def close(self) -> None:
        """End the threads; a second call does nothing."""


def kernels(choice: Choice = "auto") -> ModuleType | None:
    """The extension module, or None where it was not built, does not load, or is not wanted.

    The environment variable GGUF_PP_KERNELS=torch turns "auto" into "torch"; "native" raises
    ConfigError where there is no module.
    """
    if choice == "auto" and os.environ.get("GGUF_PP_KERNELS") == "torch":
        choice = "torch"
    if choice == "torch":
        return None
    try:
        return importlib.import_module("gguf_pp.native._kernels")
    except ImportError as exc:
        if choice == "native":
            raise ConfigError(
                f"the native kernels do not load: {exc}",
                hint="install gguf-pp where a C compiler is at hand, or use the torch kernels",
            ) from exc
        return None


def describe() -> str:
    """What the kernels are made for: "avx512-vnni", "avx2", "portable"; "none" without them."""
    module = kernels()
    return "none" if module is None else str(module.isa)


def start_team(n_threads: int) -> Team:
    """Start `n_threads - 1` threads; ConfigError without kernels, OSError without threads."""
    module = kernels("native")
    assert module is not None
    return cast(Team, module.Team(n_threads))
