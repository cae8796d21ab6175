"""The contract of models/, what they share, and the one dynamic import.

A file in models/ is named after its `general.architecture` and provides `Model(metadata)`. The
three `load_*` methods name every tensor with its shape through a `Loader`: one loader reads them
to a device, another only adds up bytes, so what is checked, planned and loaded is one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, cast

from gguf_pp.batch import UBatch
from gguf_pp.errors import FormatError, UnsupportedError
from gguf_pp.gguf import Metadata
from gguf_pp.ops.base import ExpertMatrix, LayerKV, Matrix, Ops, Rope, RopeParams

if TYPE_CHECKING:
    from torch import Tensor


class Loader(Protocol):
    """Takes tensors of the file to where they are wanted. Raises FormatError if one is missing
    or has another shape than asked. `n_ctx` is the context that is planned for."""

    n_ctx: int

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        ...

    def n_rows(self, name: str) -> int:
        """Rows of a matrix whose size only the file knows (the vocabulary)."""
        ...

    def matrix(self, *parts: tuple[str, int], n_cols: int) -> Matrix:
        """Tensors (name, n_rows), stacked by rows."""
        ...

    def experts(self, *parts: tuple[str, int], n_cols: int, n_experts: int) -> ExpertMatrix:
        """Tensors [n_experts, n_rows, n_cols], the rows of an expert stacked."""
        ...

    def vector(self, name: str, size: int) -> Tensor:
        """A small tensor as float32 [size]."""
        ...

    def vectors(self, *parts: tuple[str, int]) -> Tensor:
        """Small tensors (name, size), joined end to end as float32."""
        ...

    def rope(self, params: RopeParams) -> Rope:
        """Rotation tables for as many positions as the context has."""
        ...


class Model(Protocol):
    """What a module in models/ provides: three steps, so that a stage can run any part."""

    hp: HParams

    @property
    def ropes(self) -> Sequence[RopeParams]:
        """Each kind of rotation that layers ask for, without its factors."""
        ...

    def load_embedding(self, load: Loader) -> Any:
        """Weights of `embed`."""
        ...

    def load_layer(self, load: Loader, i_layer: int) -> Any:
        """Weights of one layer."""
        ...

    def load_head(self, load: Loader) -> Any:
        """Weights of `logits`."""
        ...

    def embed(self, ops: Ops, w: Any, ids: Tensor) -> Tensor:
        """Token ids to hidden states [T, E]."""
        ...

    def layer(self, ops: Ops, w: Any, x: Tensor, kv: LayerKV, ubatch: UBatch) -> Tensor:
        """One layer: [T, E] to [T, E]. May overwrite `x`."""
        ...

    def logits(self, ops: Ops, w: Any, x: Tensor) -> Tensor:
        """Hidden states of the rows that want logits [n, E] to logits [n, V]."""
        ...


@dataclass(frozen=True, slots=True)
class HParams:
    """Sizes that every decoder model has; `n_experts` 0 is none. Vocabulary size: rows of the token
    embedding."""

    architecture: str
    n_layers: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    n_experts: int
    eps: float

    @classmethod
    def read(cls, metadata: Metadata) -> HParams:
        """Read `<architecture>.*` keys; raises FormatError where one is missing or absurd."""
        arch = metadata.str_of("general.architecture")
        n_heads = _same_everywhere(metadata, f"{arch}.attention.head_count")
        n_embd = metadata.int_of(f"{arch}.embedding_length")
        if n_heads < 1 or n_embd < 1:
            raise FormatError(f"{arch}: {n_heads} heads and a width of {n_embd} make no model")
        n_kv_heads = _same_everywhere(metadata, f"{arch}.attention.head_count_kv", n_heads)
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise FormatError(
                f"{arch}.attention.head_count ({n_heads}) is no multiple of head_count_kv "
                f"({n_kv_heads})"
            )
        head_size = metadata.int_of(f"{arch}.attention.key_length", n_embd // n_heads)
        value_size = metadata.int_of(f"{arch}.attention.value_length", head_size)
        if value_size != head_size:
            raise UnsupportedError(
                f"{arch}: values of {value_size} with keys of {head_size} are not implemented"
            )
        sizes = cls(
            architecture=arch,
            n_layers=metadata.int_of(f"{arch}.block_count"),
            n_ctx_train=metadata.int_of(f"{arch}.context_length"),
            n_embd=n_embd,
            n_ff=_same_everywhere(metadata, f"{arch}.feed_forward_length"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_size=head_size,
            n_experts=metadata.int_of(f"{arch}.expert_count", 0),
            eps=metadata.float_of(f"{arch}.attention.layer_norm_rms_epsilon"),
        )
        sizes._check()
        return sizes

    def _check(self) -> None:
        """Refuse sizes that no file can mean, before anything is allocated by them."""
        limits = {
            "block_count": (self.n_layers, 1, 10_000),
            "context_length": (self.n_ctx_train, 1, 1 << 30),
            "embedding_length": (self.n_embd, 1, 1 << 20),
            "feed_forward_length": (self.n_ff, 1, 1 << 22),
            "attention.key_length": (self.head_size, 1, 1 << 14),
        }
        for key, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise FormatError(
                    f"{self.architecture}.{key} is {value}, outside of [{low}, {high}]"
                )
        if not 0 <= self.eps < 1:
            raise FormatError(f"{self.architecture}: a norm epsilon of {self.eps}")

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections."""
        return (
            self.n_heads * self.head_size,
            self.n_kv_heads * self.head_size,
            self.n_kv_heads * self.head_size,
        )


def _same_everywhere(metadata: Metadata, key: str, default: int | None = None) -> int:
    """An integer, or an array with the same integer for every layer."""
    if isinstance(metadata.get(key), int | None):
        return metadata.int_of(key) if default is None else metadata.int_of(key, default)
    values = set(metadata.list_of(key, int))
    if len(values) != 1:
        raise UnsupportedError(f"{key} differs between layers, which is not implemented")
    return values.pop()


def read_rope(metadata: Metadata, hp: HParams, *, neox: bool) -> RopeParams:
    """Read `<architecture>.rope.*` keys."""
    prefix = f"{hp.architecture}.rope"
    kind = metadata.str_of(f"{prefix}.scaling.type", "none")
    factor = metadata.float_of(f"{prefix}.scaling.factor", 0.0)
    if not factor:  # the older key
        factor = metadata.float_of(f"{prefix}.scale_linear", 0.0)
        kind = "linear" if factor and kind == "none" else kind
    factor = factor or 1.0
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedError(f"{prefix}.scaling.type {kind!r} is not implemented")
    n_rot = metadata.int_of(f"{prefix}.dimension_count", hp.head_size)
    n_ctx_original = metadata.int_of(f"{prefix}.scaling.original_context_length", hp.n_ctx_train)
    if not (0 < n_rot <= hp.head_size and n_rot % 2 == 0):
        raise FormatError(f"{prefix}.dimension_count is {n_rot} with heads of {hp.head_size}")
    if not (factor > 0 and n_ctx_original > 0):
        raise FormatError(f"{prefix}.scaling: factor {factor}, context {n_ctx_original}")
    return RopeParams(
        n_rot=n_rot,
        base=read_rope_base(metadata, hp, "freq_base"),
        neox=neox,
        scaling="linear" if kind == "linear" else "yarn" if kind == "yarn" else "none",
        factor=factor,
        n_ctx_original=n_ctx_original,
        magnitude=metadata.float_of(f"{prefix}.scaling.attn_factor", 1.0),
    )


def read_rope_base(metadata: Metadata, hp: HParams, name: str) -> float:
    """Read a base of rotation, 10,000 unless given. Raises FormatError for one of 1 or less."""
    key = f"{hp.architecture}.rope.{name}"
    base = metadata.float_of(key, 10000.0)
    if not base > 1:
        raise FormatError(f"{key} is {base}, and must be above 1")
    return base


def read_window(metadata: Metadata, hp: HParams, default: int) -> int:
    """Read how many positions a layer with a sliding window sees; 0 is all. Raises FormatError."""
    key = f"{hp.architecture}.attention.sliding_window"
    window = metadata.int_of(key, default)
    if not 0 <= window < 1 << 32:
        raise FormatError(f"{key} is {window}, outside of [0, 2**32)")
    return window


def known() -> list[str]:
    """Names of all architectures we can run: the files in models/, and nothing to register."""
    return sorted(m.name for m in iter_modules(import_module("gguf_pp.models").__path__))


def build(metadata: Metadata) -> Model:
    """Make the model that the file calls for; raises UnsupportedError for an unknown one."""
    name = metadata.str_of("general.architecture")
    if name not in known():
        raise UnsupportedError(
            f"the architecture {name!r} is not supported",
            hint=f"supported: {', '.join(known())}",
        )
    return cast(Model, import_module(f"gguf_pp.models.{name}").Model(metadata))
