"""`gguf-pp pull`: get a known model, or say which ones there are."""

from pathlib import Path
from typing import Annotated

import typer

from gguf_pp import fetch

from .console import logs, progress
from .session import mib, print_json


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A known model.", show_default=False)
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir",
            metavar="DIR",
            help="Where known models are kept; also $GGUF_PP_CACHE.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Download a known model unless it is there, and print its path. Without a name, list them."""
    if name is None:
        _list(cache_dir or fetch.default_cache_dir(), as_json=as_json)
        return
    with logs(verbose=False), progress(f"downloading {name}", in_bytes=True) as update:
        path = fetch.resolve(name, cache_dir, update)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)


def _list(folder: Path, *, as_json: bool) -> None:
    rows = []
    for name, model in sorted(fetch.KNOWN.items()):
        cached = folder / model.cached_name
        there = cached.is_file() and cached.stat().st_size == model.n_bytes
        rows.append((name, model, str(cached) if there else None))
    if as_json:
        keys = ("name", "file", "n_bytes", "sha256", "path")
        values = [(n, m.file, m.n_bytes, m.sha256, path) for n, m, path in rows]
        print_json([dict(zip(keys, row, strict=True)) for row in values])
        return
    for name, model, path in rows:
        print(f"{name:16} {mib(model.n_bytes):>10}  {path or 'not downloaded'}")
