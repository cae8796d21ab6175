"""Telling a user what the file is when it is not a GGUF."""

from pathlib import Path
from typing import Final

from gguf_pp.errors import FormatError

MAGIC: Final = b"GGUF"
_OLD_LLAMA: Final = "convert the original model again with a current llama.cpp"
_CONVERT: Final = "convert it with llama.cpp's convert_hf_to_gguf.py, or download the GGUF file"
# Old llama.cpp files hold their magic as a little-endian number: "ggml" reads backwards.
_GUESSES: Final[tuple[tuple[bytes, str, str], ...]] = (
    (b"version https://git-lfs", "a git-lfs pointer", "fetch the real file with git lfs pull"),
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint", _CONVERT),
    (b"\x80\x02", "a pickle, perhaps a PyTorch checkpoint", _CONVERT),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"lmgg", "an old llama.cpp file (ggml)", _OLD_LLAMA),
    (b"fmgg", "an old llama.cpp file (ggmf)", _OLD_LLAMA),
    (b"tjgg", "an old llama.cpp file (ggjt)", _OLD_LLAMA),
    (b"algg", "an old llama.cpp adapter (ggla)", _OLD_LLAMA),
)


def check_magic(head: bytes, path: Path) -> None:
    """Raise FormatError unless `head`, the first bytes of a file, begins a GGUF."""
    if head.startswith(MAGIC):
        return
    if not head:
        raise FormatError(f"{path}: the file is empty", hint="the download failed: fetch it again")
    guess, hint = _guess(head)
    raise FormatError(f"{path}: not a GGUF file: {guess}", hint=hint)


def _guess(head: bytes) -> tuple[str, str | None]:
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page", "the download gave a web page: use the direct link to the file"
    # safetensors: u64 length of the JSON header, then the header
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file", _CONVERT
    for magic, guess, hint in _GUESSES:
        if head.startswith(magic):
            return guess, hint
    return f"it begins with {head[:4]!r}", None
