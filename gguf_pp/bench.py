"""What a benchmark measures, and what comes out: cases, rows, and what to say about them.

Measuring itself is in measure.py; nothing here loads torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Annotated, Literal, get_type_hints

from gguf_pp.config import RuntimeConfig
from gguf_pp.timeline import Waiting, advice

NO_GAIN = 1.03
"""A speed-up below this is within what repetitions differ by."""
FILLED = 0.25
"""Share of idle device time up to which devices count as filled."""

Phase = Literal["prompt", "decode"]


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be: `parallel` streams read `n_prompt` tokens each, or, if that is 0, make
    `n_gen` each; `depth` tokens of each stream are in the cache before."""

    config: RuntimeConfig
    n_prompt: int
    n_gen: int
    parallel: int
    depth: int

    @property
    def phase(self) -> Phase:
        """Which of the two is measured."""
        return "prompt" if self.n_prompt else "decode"

    @property
    def name(self) -> str:
        """`pp512`, `tg64 @ 16`, `tg64 @ 16 d1024`."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        name += f" @ {self.parallel}" if self.parallel > 1 else ""
        return name + (f" d{self.depth}" if self.depth else "")

    @property
    def n_cells(self) -> int:
        """Context that each stream needs."""
        return (self.depth or 1) + (self.n_prompt or self.n_gen) + 1

    def serial(self) -> "Case":
        """The same on the same devices, which take turns."""
        return replace(self, config=serial(self.config))

    def alone(self) -> "Case":
        """The same on the first device."""
        return replace(self, config=alone(self.config))


def serial(config: RuntimeConfig) -> RuntimeConfig:
    """`config` without pipelining."""
    return replace(config, n_copies=1)


def alone(config: RuntimeConfig) -> RuntimeConfig:
    """`config` on the first of its devices."""
    return replace(config, devices=config.devices[:1], shares=None, layers=None, n_copies=1)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists whose product is measured; `configs` are settled, each a way to place the model."""

    configs: Sequence[RuntimeConfig]
    n_prompts: Sequence[int]
    n_gens: Sequence[int]
    parallel: Sequence[int]
    depths: Sequence[int]
    one_device: bool = False

    def cases(self) -> list[Case]:
        """All cases, each once; before a pipelined one its baselines, asked for or not.

        Prompts and answers of 0 tokens are left out. Cases with equal `config` stand together.
        """
        tests = [(n, 0) for n in self.n_prompts if n] + [(0, n) for n in self.n_gens if n]
        return [
            Case(config, n_prompt, n_gen, parallel, depth)
            for config in self._configs()
            for depth, (n_prompt, n_gen), parallel in product(self.depths, tests, self.parallel)
        ]

    def added(self) -> list[RuntimeConfig]:
        """Serial ones that `cases` adds as baselines, though they were not asked for."""
        asked = {_plain(config) for config in self.configs}
        asked |= {alone(config) for config in asked if self.one_device}
        return [config for config in self._configs() if config not in asked]

    def _configs(self) -> list[RuntimeConfig]:
        wanted = dict.fromkeys(self._with_baselines())
        return sorted(wanted, key=lambda c: (len(c.devices), c.n_copies > 1))

    def _with_baselines(self) -> Iterator[RuntimeConfig]:
        for config in map(_plain, self.configs):
            if self.one_device:
                yield alone(config)
            yield serial(config)
            yield config


def _plain(config: RuntimeConfig) -> RuntimeConfig:
    """Without what the case settles or what only explains, so that equal runs are equal."""
    return replace(config, notes=(), n_slots=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one case gave. `keys()` explains each field; they are also the keys of the output."""

    test: Annotated[
        str, "pp512: prompts of 512 tokens; tg64: 64 tokens made; @ 16: streams; d9: depth"
    ]
    model: Annotated[str, "file name"]
    size: Annotated[int, "bytes of all tensors"]
    params: Annotated[int, "number of weights"]
    quantization: Annotated[str, "file type, such as Q4_1"]
    devices: Annotated[tuple[str, ...], "names in pipeline order; the lists below have this order"]
    layers_per_device: Annotated[tuple[int, ...], "numbers of layers"]
    threads: Annotated[tuple[int, ...], "threads that compute on each device"]
    kernels: Annotated[tuple[str, ...], "what computes on each device"]
    n_copies: Annotated[int, "rotating input buffers per device; 1 is serial"]
    pipeline: Annotated[bool, "whether devices work at the same time"]
    pipeline_reason: Annotated[str | None, "why not, or null"]
    groups_in_flight: Annotated[int | None, "groups that streams decode in; null for prompts"]
    ubatch_size: Annotated[int, "tokens that cross a device at once, at most; auto: as many as did"]
    n_prompt: Annotated[int, "prompt tokens per stream that are timed, or 0"]
    n_gen: Annotated[int, "tokens made per stream that are timed, or 0"]
    parallel: Annotated[int, "streams"]
    depth: Annotated[int, "tokens of each stream that are in the cache before"]
    tokens_per_s: Annotated[float, "median over the repetitions, of all streams together"]
    tokens_per_s_sd: Annotated[float, "their standard deviation"]
    speedup: Annotated[float | None, "against n_copies 1 on the same devices"]
    speedup_one_device: Annotated[
        float | None, "against the first device alone (--baseline), or null"
    ]
    busy_share: Annotated[tuple[float, ...], "share of the time in which each device computed"]
    bubble_share: Annotated[float, "share of device time without work: 1 - sum(busy) / (P span)"]
    bubble_predicted: Annotated[
        float, "(P-1)/(M+P-1) for M ubatches; 1 - G/P where only G < P are in flight"
    ]
    waiting_starved: Annotated[float | None, "share of waiting with nothing to run; null if none"]
    waiting_uneven: Annotated[float | None, "share of waiting for a slower stage"]
    waiting_transfer: Annotated[float | None, "share of waiting for a transfer"]
    bytes_per_edge: Annotated[
        tuple[int, ...], "bytes sent from each device to the next, in one run"
    ]
    peak_memory: Annotated[
        tuple[int, ...], "bytes held on each device, for the largest case loaded"
    ]
    versions: Annotated[dict[str, str], "of gguf_pp, python and torch"]

    def as_dict(self) -> dict[str, object]:
        """Values by key, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def waiting(self) -> Waiting:
        """Shares of waiting; all 0 if nothing was waited for."""
        return Waiting(
            self.waiting_starved or 0.0, self.waiting_uneven or 0.0, self.waiting_transfer or 0.0
        )


def keys() -> dict[str, str]:
    """What each key of a row is."""
    hints = get_type_hints(Row, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(Row)}


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, in plain sentences."""
    many = [row for row in rows if len(row.devices) > 1]
    said = [*_sequential(many), *_advised(many), *_enough_copies(many)]
    return list(dict.fromkeys(said))


def _sequential(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row.n_gen and row.parallel == 1:
            n = len(row.devices)
            yield f"decode of one stream is sequential: {n} devices cannot speed it up"


def _advised(rows: Iterable[Row]) -> Iterator[str]:
    """Advice for the pipelined row that left devices idle the most."""
    able = [row for row in rows if row.pipeline and (row.n_prompt or row.parallel > 1)]
    if not able:
        return
    worst = max(able, key=lambda row: row.bubble_share)
    text = advice(
        worst.waiting, worst.bubble_share, worst.busy_share, worst.layers_per_device, worst.n_copies
    )
    if text is not None:
        yield f"{worst.test}: {text}"


def _enough_copies(rows: Iterable[Row]) -> Iterator[str]:
    """Where two copies fill the devices, and more were tried in vain."""
    alike: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in rows:
        if row.pipeline:
            sizes = row.ubatch_size if row.n_prompt else 0
            same = (row.test, row.devices, row.layers_per_device, row.threads, sizes)
            alike.setdefault(same, {})[row.n_copies] = row
    for by_copies in alike.values():
        few = by_copies.get(2)
        if few is None or len(by_copies) < 2 or few.bubble_share > FILLED:
            continue
        best = max(row.tokens_per_s for row in by_copies.values())
        if best < few.tokens_per_s * NO_GAIN:
            what = f"{few.parallel} streams fill" if few.n_gen else f"{few.test} fills"
            yield f"{what} {len(few.devices)} devices; more copies gain nothing"
