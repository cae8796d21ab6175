"""Run one GGUF model across several devices, as a pipeline."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf_pp.api import LLM, Completion, Generation, load
    from gguf_pp.config import Options
    from gguf_pp.errors import GgufPpError

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Generation", "GgufPpError", "Options", "__version__", "load"]

_HOME = {
    "LLM": "api",
    "Completion": "api",
    "Generation": "api",
    "load": "api",
    "Options": "config",
    "GgufPpError": "errors",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `gguf-pp --help` never loads torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
