"""`gguf-pp inspect`: what is in a GGUF file, whether or not it can be run.

Text from the file is shown through `printable`: it may hold escape sequences.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguf_pp import fetch
from gguf_pp.errors import ConfigError, GgufPpError

from .console import logs, progress
from .session import print_json
from .tables import count, print_table, printable, size

if TYPE_CHECKING:
    from gguf_pp.gguf import Metadata, ModelFile
    from gguf_pp.gguf.header import TensorInfo

TEMPLATE = "tokenizer.chat_template"
N_ITEMS = 6
N_CHARS = 80
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding", "separator", "mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectFlags:
    """Which file, and how much of it."""

    model: Annotated[str, typer.Argument(metavar="FILE", help="A GGUF file, or a known name.")]
    show_all: Annotated[
        bool, typer.Option("--all", help="Whole arrays and texts, and every tensor of every layer.")
    ] = False
    template: Annotated[
        bool, typer.Option("--template", help="Print the chat template and nothing else.")
    ] = False
    override_kv: Annotated[
        list[str] | None,
        typer.Option(
            "--override-kv",
            metavar="KEY=TYPE:VALUE",
            help="Replace metadata; TYPE is int, float, bool or str. Repeatable.",
            show_default=False,
        ),
    ] = None
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir",
            metavar="DIR",
            help="Where known models are kept; also $GGUF_PP_CACHE.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def inspect(flags: InspectFlags) -> None:
    """Show the metadata, tensors, tokenizer and shards of a GGUF file.

    Reads no weights, and works on files that cannot be run. Long arrays are shortened, and layers
    that are alike shown once, unless --all is given.
    """
    with logs(verbose=False), progress(f"downloading {flags.model}", in_bytes=True) as update:
        path = fetch.resolve(flags.model, flags.cache_dir, update)
    from gguf_pp.gguf import ModelFile

    with ModelFile.open(path, flags.override_kv or ()) as file:
        if flags.template:
            _print_templates(file.metadata)
            return
        with logs(verbose=False):
            tokenizer = describe_tokenizer(file.metadata)
        if flags.as_json:
            print_json(as_json(file, tokenizer, whole=flags.show_all))
        else:
            _show(file, tokenizer, whole=flags.show_all)


def _print_templates(metadata: "Metadata") -> None:
    """All of them, each after a comment with its key if there are several; as they are but for
    control characters."""
    keys = [key for key in metadata if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")]
    if not keys:
        raise ConfigError("the file has no chat template")
    for key in sorted(keys):
        if len(keys) > 1:
            print(f"{{# {printable(key)} #}}")
        print(printable(metadata.str_of(key), lines=True))


def support(file: "ModelFile") -> str | None:
    """Why the file cannot be run: its kind, or its architecture. None if those are fine."""
    from gguf_pp.arch import known

    try:
        file.require_model()
        if file.architecture in known():
            return None
    except GgufPpError as exc:
        return str(exc).removeprefix(f"{file.path}: ")
    return f"the architecture is not among {', '.join(known())}"


def describe_tokenizer(metadata: "Metadata") -> dict[str, Any]:
    """Family, size and special ids, from the metadata; `unsupported` says why we cannot use it."""
    from gguf_pp.tokenizer import Tokenizer

    unsupported: str | None = None
    ends: list[int] = []
    try:
        ends = sorted(Tokenizer.from_metadata(metadata).eog_ids)
    except GgufPpError as exc:
        unsupported = str(exc)
    tokens = metadata.get("tokenizer.ggml.tokens")
    keys = {name: f"tokenizer.ggml.{name}_token_id" for name in SPECIAL}
    return {
        "model": _plain(metadata.get("tokenizer.ggml.model"), whole=False),
        "pre": _plain(metadata.get("tokenizer.ggml.pre"), whole=False),
        "n_vocab": len(tokens) if isinstance(tokens, list) else 0,
        "special": {
            name: _plain(metadata[key], whole=False)
            for name, key in keys.items()
            if key in metadata
        },
        "end_of_generation": ends,
        "unsupported": unsupported,
    }


def as_json(file: "ModelFile", tokenizer: dict[str, Any], *, whole: bool) -> dict[str, object]:
    """What --json prints. Without `whole`, a long array is its `n_items` and the `first`."""
    infos = file.tensors.values()
    return {
        "path": str(file.path),
        "architecture": _plain(file.metadata.get("general.architecture"), whole=False),
        "unsupported": support(file),
        "n_bytes": file.n_bytes,
        "n_parameters": n_parameters(infos),
        "bits_per_weight": bits_per_weight(infos),
        "shards": [
            {"path": str(path), "n_tensors": len(mine), "n_bytes": sum(i.n_bytes for i in mine)}
            for path, mine in _shards(file)
        ],
        "metadata": {key: _plain(value, whole=whole) for key, value in file.metadata.items()},
        "types": [
            {"type": kind, "n_tensors": len(mine), "n_bytes": sum(info.n_bytes for info in mine)}
            for kind, mine in _by_type(infos)
        ],
        "tensors": [
            {
                "name": info.name,
                "type": info.type.name,
                "shape": list(info.shape),
                "n_bytes": info.n_bytes,
            }
            for info in infos
        ],
        "tokenizer": tokenizer,
    }


def n_parameters(infos: Iterable["TensorInfo"]) -> int:
    """Elements of all tensors."""
    return sum(math.prod(info.shape) for info in infos)


def bits_per_weight(infos: Iterable["TensorInfo"]) -> float | None:
    """None without tensors."""
    infos = list(infos)
    return 8 * sum(i.n_bytes for i in infos) / n_parameters(infos) if infos else None


def _shards(file: "ModelFile") -> list[tuple[Path, list["TensorInfo"]]]:
    infos = file.tensors.values()
    return [
        (path, [info for info in infos if info.i_shard == i]) for i, path in enumerate(file.shards)
    ]


def _by_type(infos: Iterable["TensorInfo"]) -> list[tuple[str, list["TensorInfo"]]]:
    """Tensors by type, the type with the most bytes first."""
    types: dict[str, list[TensorInfo]] = {}
    for info in infos:
        types.setdefault(info.type.name, []).append(info)
    return sorted(types.items(), key=lambda item: -sum(info.n_bytes for info in item[1]))


def _plain(value: Any, *, whole: bool) -> object:
    """A metadata value for JSON, which has neither NaN nor infinity: those become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bool | int | str | None):
        return value
    first = [_plain(item, whole=whole) for item in _items(value, whole=whole)]
    return first if len(value) == len(first) else {"n_items": len(value), "first": first}


def _items(array: Any, *, whole: bool) -> list[Any]:
    """The first items of an array of the metadata, or all."""
    items = array if whole else array[:N_ITEMS]
    return items if isinstance(items, list) else list(items.tolist())


def _show(file: "ModelFile", tokenizer: dict[str, Any], *, whole: bool) -> None:
    infos = list(file.tensors.values())
    _show_summary(file, infos)
    print("\nmetadata")
    keys = {key: printable(key) for key in file.metadata}
    width = max(map(len, keys.values()), default=0)
    for key, value in file.metadata.items():
        print(f"{keys[key]:{width}}  {_text(value, whole=whole)}")
    if infos:
        print("\ntensors")
        print_table(("tensor", "type", "shape", "size"), tensor_rows(infos, whole=whole), n_left=3)
        print()
        _show_types(infos)
    print("\ntokenizer")
    _show_tokenizer(tokenizer, file.metadata.get("tokenizer.ggml.tokens"))


def _show_summary(file: "ModelFile", infos: Sequence["TensorInfo"]) -> None:
    architecture = _text(file.metadata.get("general.architecture", "not named"), whole=False)
    why_not = support(file)
    print(f"file          {printable(str(file.path))}")
    print(f"architecture  {architecture}")
    print(f"supported     {'yes' if why_not is None else f'no: {printable(why_not)}'}")
    bits = bits_per_weight(infos)
    if bits is not None:
        print(f"parameters    {n_parameters(infos):,} in {len(infos)} tensors")
        print(f"size          {size(file.n_bytes)}, {bits:.2f} bits per weight")
    if len(file.shards) > 1:
        for i, (path, mine) in enumerate(_shards(file)):
            n_bytes = sum(info.n_bytes for info in mine)
            text = f"{printable(path.name)}: {count(len(mine), 'tensor')}, {size(n_bytes)}"
            print(f"{f'shard {i + 1}':12}  {text}")


def tensor_rows(infos: Sequence["TensorInfo"], *, whole: bool) -> list[tuple[str, str, str, str]]:
    """Name, type, shape and size of each tensor; those of a layer below a row with its number.

    Unless `whole`, layers whose tensors are alike are shown once, below all their numbers.
    """
    layers: dict[int, dict[str, TensorInfo]] = {}
    rows = []
    for info in infos:
        match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", info.name, re.DOTALL)
        if match is None:
            rows.append(_row(info.name, info))
        else:
            layers.setdefault(int(match[1]), {})[match[2]] = info
    alike: dict[object, list[int]] = {}
    for i in sorted(layers):
        alike.setdefault(i if whole else _signature(layers[i]), []).append(i)
    for numbers in alike.values():
        rows.append((f"blk.{_ranges(numbers)}", "", "", ""))
        for name, info in layers[numbers[0]].items():
            rows.append(_row(f"  {name}", info, times=len(numbers)))
    return rows


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _signature(layer: dict[str, "TensorInfo"]) -> frozenset[tuple[str, str, tuple[int, ...]]]:
    return frozenset((name, info.type.name, info.shape) for name, info in layer.items())


def _row(name: str, info: "TensorInfo", times: int = 1) -> tuple[str, str, str, str]:
    factor = f"{times} x " if times > 1 else ""
    shape = " x ".join(map(str, info.shape))
    return printable(name), info.type.name, shape, factor + size(info.n_bytes)


def _show_types(infos: Sequence["TensorInfo"]) -> None:
    rows = []
    for kind, mine in _by_type(infos):
        n_bytes = sum(info.n_bytes for info in mine)
        bits = f"{bits_per_weight(mine):.2f}"
        rows.append((kind, str(len(mine)), f"{n_parameters(mine):,}", size(n_bytes), bits))
    print_table(("type", "tensors", "weights", "size", "bits per weight"), rows)


def _show_tokenizer(tokenizer: dict[str, Any], tokens: object) -> None:
    texts = tokens if isinstance(tokens, list) else []

    def named(i: object) -> str:
        known = isinstance(i, int) and 0 <= i < len(texts)
        return f"{i} {_text(texts[i], whole=False)}" if known else str(i)  # type: ignore[call-overload]

    for key in ("model", "pre", "n_vocab"):
        if tokenizer[key] is not None:
            print(f"{key:18} {printable(str(tokenizer[key]))}")
    for name, i in tokenizer["special"].items():
        print(f"{name:18} {named(i)}")
    if tokenizer["end_of_generation"]:
        print(f"{'end of generation':18} {', '.join(map(named, tokenizer['end_of_generation']))}")
    if tokenizer["unsupported"]:
        print(f"{'not usable':18} {printable(tokenizer['unsupported'])}")


def _text(value: Any, *, whole: bool) -> str:
    """A metadata value in one line."""
    if isinstance(value, str):
        shown = value if whole else value[:N_CHARS]
        more = f" ... ({len(value)} characters)" if len(shown) < len(value) else ""
        return printable(shown) + more
    if isinstance(value, bool | int | float):
        return f"{value:.7g}" if isinstance(value, float) else str(value)
    items = [_text(item, whole=whole) for item in _items(value, whole=whole)]
    more = f", ... ({len(value)} items)" if len(items) < len(value) else ""
    return f"[{', '.join(items)}{more}]"
