"""What commands that load a model have in common: open it, say what it is made of."""

import gc
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_pp import config, fetch
from gguf_pp.config import Options
from gguf_pp.errors import ConfigError

from .console import logs, progress, show_table, show_warning
from .flags import EngineFlags

if TYPE_CHECKING:
    from gguf_pp.api import LLM, Completion


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model and how long that took."""

    llm: "LLM"
    load_s: float


@contextmanager
def open_session(flags: EngineFlags, options: Options) -> Iterator[Session]:
    """Load the model with bars and a table on stderr. Raises GgufPpError."""
    name = flags.model_name()
    # A bad flag is told at once, not after a download and the import of torch.
    config.resolve(options)
    with logs(verbose=flags.verbose):
        with progress(f"downloading {name}", in_bytes=True) as update:
            path = fetch.resolve(name, flags.cache_dir, update)
        from gguf_pp.api import LLM

        start = time.perf_counter()
        with progress(f"loading {path.name}", in_bytes=True) as update, _no_collection():
            llm = LLM(path, options, update)
        with llm:
            load_s = time.perf_counter() - start
            for note in llm.notes:
                show_warning(note)
            if options.device is None and (unused := _cuda_devices()):
                print(f"{unused} not used: --device names what is", file=sys.stderr)
            show_placement(llm)
            yield Session(llm, load_s)


def _cuda_devices() -> str:
    """All that there are and torch can use."""
    import torch

    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ",".join(f"cuda:{i}" for i in range(n_devices))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: the modules of torch make none, and 250,000 objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def show_placement(llm: "LLM") -> None:
    """Print what each device holds, the context, and whether the devices are pipelined."""
    buffers = f"buffers (x{llm.n_copies})" if llm.n_copies > 1 else "buffers"
    rows: list[tuple[str, ...]] = [
        ("device", "layers", "kernels", "weights", "KV", buffers, "free")
    ]
    for use in llm.devices():
        first, end = use.layers
        sizes = (use.weight_bytes, use.kv_bytes, use.buffer_bytes, use.free_bytes)
        rows.append((use.name, f"{first}-{end - 1}", use.kernels, *map(mib, sizes)))
    show_table(rows)
    why_not = llm.not_pipelined_because
    pipelining = f"off: {why_not}" if why_not else f"on: {llm.n_copies} copies"
    print(f"n_ctx {llm.ctx_size} of {llm.ctx_train}", file=sys.stderr)
    print(f"pipelining {pipelining}", file=sys.stderr)


def placement(llm: "LLM") -> dict[str, object]:
    """The same for --json."""
    why_not = llm.not_pipelined_because
    return {
        "devices": [
            {
                "name": use.name,
                "layers": list(use.layers),
                "weight_bytes": use.weight_bytes,
                "kv_bytes": use.kv_bytes,
                "buffer_bytes": use.buffer_bytes,
            }
            for use in llm.devices()
        ],
        "n_copies": llm.n_copies,
        "pipeline": {"enabled": not why_not, "reason": why_not or None},
    }


def show_rates(completions: Sequence["Completion"]) -> None:
    """Print how fast prompts were read and answers written, all together."""
    prompts = [(c.prompt_tokens, c.prompt_tokens_per_s) for c in completions]
    answers = [(c.decode_tokens, c.decode_tokens_per_s) for c in completions]
    for title, parts in (("prompt", prompts), ("decode", answers)):
        timed = [(n, rate) for n, rate in parts if rate]
        n_tokens = sum(n for n, _ in timed)
        seconds = sum(n / rate for n, rate in timed)
        speed = f"{n_tokens / seconds:9.2f} tokens/s" if seconds else "        - tokens/s"
        print(f"{title} {n_tokens:7d} tokens {speed}", file=sys.stderr)


def mib(n_bytes: int) -> str:
    """Bytes for people, in MiB or GiB."""
    if n_bytes >= 10 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    return f"{n_bytes / (1 << 20):.1f} MiB"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, or of stdin for `-`, as it is. Raises ConfigError."""
    name = "stdin" if str(path) == "-" else str(path)
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return raw.decode("utf-8")
    except OSError as exc:
        raise ConfigError(f"{name} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"{name} is not UTF-8: byte 0x{exc.object[exc.start]:02x} at offset {exc.start}",
            hint="convert it to UTF-8, for instance with iconv",
        ) from exc


def print_json(value: object) -> None:
    """Print one JSON value to stdout, in ASCII, so that no encoding can spoil it."""
    print(json.dumps(value, allow_nan=False), flush=True)


def finite(value: float) -> float | None:
    """A number for JSON, which has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
