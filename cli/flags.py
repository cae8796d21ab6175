"""Flags that several commands take, in groups, each declared once.

A command takes a whole group as one parameter; `flatten` shows typer the flags in it.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguf_pp.config import Options

from .console import Misuse

if TYPE_CHECKING:
    from gguf_pp.sampling import SamplingOptions


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with a parameter per flag where it has one that is a group of flags."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}

    def flat(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    flags: list[inspect.Parameter] = []
    for parameter in own:
        group = groups.get(parameter.name)
        flags += inspect.signature(group).parameters.values() if group else [parameter]
    flags = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags]
    # Lines are broken by the terminal's width, not by ours.
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    flat.__doc__ = "\n\n".join(map(_flowing, paragraphs))
    flat.__annotations__ = {flag.name: flag.annotation for flag in flags}
    flat.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    return flat


def _flowing(paragraph: str) -> str:
    """The paragraph in one line; a list, which begins with a backspace in a line, as it is."""
    if paragraph.startswith("\b\n"):
        return paragraph.removeprefix("\b\n")
    return " ".join(paragraph.split())


def number_or_auto(text: str) -> int | None:
    """Parse a whole number; None stands for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto") from exc


_model = functools.partial(typer.Option, rich_help_panel="Model", show_default=False)
_place = functools.partial(typer.Option, rich_help_panel="Devices and split")
_remote = functools.partial(typer.Option, rich_help_panel="Other machines")
_size = functools.partial(typer.Option, rich_help_panel="Context and batches")
_sample = functools.partial(typer.Option, rich_help_panel="Sampling")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFlags:
    """Which model, on which devices, in which sizes. None is a flag not given, or "auto"."""

    positional: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A GGUF file, or a known name.", show_default=False),
    ] = None
    model: Annotated[
        str | None, _model("--model", "-m", metavar="MODEL", help="The same, as a flag.")
    ] = None
    cache_dir: Annotated[
        Path | None,
        _model(
            "--cache-dir",
            metavar="DIR",
            help="Where known models are kept; also $GGUF_PP_CACHE.",
        ),
    ] = None
    override_kv: Annotated[
        list[str] | None,
        _model(
            "--override-kv",
            metavar="KEY=TYPE:VALUE",
            help="Replace metadata; TYPE is int, float, bool or str. Repeatable.",
        ),
    ] = None
    device: Annotated[
        str | None,
        _place(
            "--device",
            "-dev",
            metavar="NAME,...",
            help="Devices in pipeline order: cpu, or cpu:0,cpu:1, or cuda:0,cuda:1.",
            show_default="cpu",
        ),
    ] = None
    rpc: Annotated[
        str | None,
        _place(
            "--rpc",
            metavar="HOST:PORT,...",
            help="Workers on other machines, after --device; the same as tcp://host:port there.",
            show_default=False,
        ),
    ] = None
    split_mode: Annotated[
        str,
        _place("--split-mode", "-sm", metavar="none|layer", help="One device, or layers over all."),
    ] = "layer"
    tensor_split: Annotated[
        str | None,
        _place(
            "--tensor-split",
            "-ts",
            metavar="N,...",
            help="Shares of the layers, such as 3,1; a device with 0 is not opened.",
            show_default="by bytes",
        ),
    ] = None
    layers: Annotated[
        str | None,
        _place("--layers", metavar="N,...", help="Layers per device, exactly.", show_default=False),
    ] = None
    main_gpu: Annotated[
        int, _place("--main-gpu", "-mg", metavar="N", help="The device of --split-mode none.")
    ] = 0
    n_gpu_layers: Annotated[
        str | None,
        _place(
            "--n-gpu-layers",
            "--gpu-layers",
            "-ngl",
            metavar="N|auto|all",
            help="Layers on GPUs, the last ones; those before them go to the CPU. With auto those "
            "that do not fit do.",
            show_default="auto",
        ),
    ] = None
    n_copies: Annotated[
        int | None,
        _place(
            "--n-copies",
            metavar="N|auto",
            parser=number_or_auto,
            help="Rotating input buffers per device, 1 to 16; 1 is not pipelined.",
            show_default="auto",
        ),
    ] = None
    run_ahead: Annotated[
        int | None,
        _place(
            "--run-ahead",
            metavar="N|auto",
            parser=number_or_auto,
            help="Decode steps queued before their tokens are known, 0 to 2.",
            show_default="auto",
        ),
    ] = None
    threads: Annotated[
        str | None,
        _place(
            "--threads",
            "-t",
            metavar="N,...",
            help="Threads of every device, or of each.",
            show_default="its cores",
        ),
    ] = None
    kernels: Annotated[
        str, _place("--kernels", metavar="auto|native|torch", help="What computes on a CPU.")
    ] = "auto"
    exact: Annotated[
        bool, _place("--exact", help="Compute in float32 throughout: slower, for comparisons.")
    ] = False
    memory: Annotated[
        str | None,
        _place(
            "--memory",
            metavar="SIZE,...",
            help="RAM to take at most, such as 8GiB, and of CUDA devices: cuda:0=20GiB.",
            show_default="what is available",
        ),
    ] = None
    edge_copy: Annotated[
        str,
        _place(
            "--edge-copy",
            metavar="auto|p2p|host",
            help="How CUDA devices copy to each other: directly if that works, or through RAM.",
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        bool,
        _place(
            "--cuda-graphs/--no-cuda-graphs",
            help="Launch steps of CUDA devices whole, or kernel by kernel.",
        ),
    ] = True
    wire: Annotated[
        str, _remote("--wire", metavar="f32|f16", help="Hidden states on their way.")
    ] = "f32"
    timeout: Annotated[
        float, _remote("--timeout", metavar="S", help="Silence after which a worker is gone.")
    ] = 15.0
    secret_file: Annotated[
        Path | None,
        _remote(
            "--secret-file",
            metavar="FILE",
            help="The secret that workers ask for; also $GGUF_PP_SECRET.",
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        _remote(
            "--tls-ca",
            metavar="FILE",
            help="Connect with TLS, and believe this certificate, or what it signed.",
            show_default=False,
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        _size(
            "--ctx-size",
            "-c",
            metavar="N",
            help="Tokens of prompt and answer together; 0 is as many as fit.",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[
        int, _size("--batch-size", "-b", metavar="N", help="Prompt tokens in flight at most.")
    ] = 2048
    ubatch_size: Annotated[
        int | None,
        _size(
            "--ubatch-size",
            "-ub",
            metavar="N|auto",
            parser=number_or_auto,
            help="Tokens that cross a device at once.",
            show_default="auto",
        ),
    ] = None
    cache_type_k: Annotated[
        str, _size("--cache-type-k", "-ctk", metavar="f16|f32", help="Type of cached keys.")
    ] = "f16"
    cache_type_v: Annotated[
        str, _size("--cache-type-v", "-ctv", metavar="f16|f32", help="Type of cached values.")
    ] = "f16"
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say more about what is done.")
    ] = False

    def model_name(self) -> str:
        """The model, however it was given. Raises Misuse."""
        given = {name for name in (self.positional, self.model) if name is not None}
        if len(given) > 1:
            raise Misuse(f"two models: {self.positional!r} and -m {self.model!r}")
        if not given:
            raise Misuse("no model", hint="give the path of a GGUF file, or a known name")
        return given.pop()

    def options(self, *, default_ctx_size: int | None = None) -> Options:
        """What the library is asked for."""
        ctx_size = default_ctx_size if self.ctx_size is None else self.ctx_size
        return Options(
            device=self.device,
            split_mode=self.split_mode,
            tensor_split=self.tensor_split,
            layers=self.layers,
            main_gpu=self.main_gpu,
            n_gpu_layers=self.n_gpu_layers,
            n_copies=self.n_copies,
            run_ahead=self.run_ahead,
            ctx_size=ctx_size,
            batch_size=self.batch_size,
            ubatch_size=self.ubatch_size,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            threads=self.threads,
            kernels=self.kernels,
            exact=self.exact,
            memory=self.memory,
            edge_copy=self.edge_copy,
            cuda_graphs=self.cuda_graphs,
            rpc=self.rpc,
            wire=self.wire,
            timeout=self.timeout,
            secret_file=None if self.secret_file is None else str(self.secret_file),
            tls_ca=None if self.tls_ca is None else str(self.tls_ca),
            override_kv=tuple(self.override_kv or ()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFlags:
    """How tokens are chosen."""

    seed: Annotated[
        int, _sample("--seed", "-s", metavar="N", help="Same seed, same text; -1 draws one.")
    ] = -1
    temperature: Annotated[
        float, _sample("--temp", "--temperature", metavar="X", help="0 always takes the best.")
    ] = 0.8
    top_k: Annotated[int, _sample("--top-k", metavar="N", help="Only the N best; 0 is off.")] = 40
    top_p: Annotated[
        float, _sample("--top-p", metavar="P", help="Only the best that reach P; 1 is off.")
    ] = 0.95
    min_p: Annotated[
        float, _sample("--min-p", metavar="P", help="Only above P times the best; 0 is off.")
    ] = 0.05
    repeat_penalty: Annotated[
        float, _sample("--repeat-penalty", metavar="X", help="Against repetition; 1 is off.")
    ] = 1.0
    repeat_last_n: Annotated[
        int, _sample("--repeat-last-n", metavar="N", help="Tokens it looks back at; -1 is all.")
    ] = 64
    frequency_penalty: Annotated[
        float, _sample("--frequency-penalty", metavar="X", help="Per time a token occurred.")
    ] = 0.0
    presence_penalty: Annotated[
        float, _sample("--presence-penalty", metavar="X", help="If a token occurred at all.")
    ] = 0.0
    ignore_eos: Annotated[
        bool, _sample("--ignore-eos", help="Go on past the end of the answer.")
    ] = False

    def options(self) -> "SamplingOptions":
        """What the library is asked for. Raises ConfigError."""
        from gguf_pp.sampling import SamplingParams

        options: SamplingOptions = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "seed": None if self.seed == -1 else self.seed,
            "ignore_eos": self.ignore_eos,
        }
        SamplingParams(**options)
        return options
