"""The real models that the tool itself downloads."""

from pathlib import Path

import pytest

from gguf_pp import fetch
from gguf_pp.errors import DownloadError


def real(name: str) -> Path:
    """Where it is; skips the test if it neither is there nor can be had."""
    try:
        return Path(fetch.resolve(name))
    except DownloadError as exc:
        pytest.skip(f"{name} is not in the cache and cannot be downloaded: {exc}")
