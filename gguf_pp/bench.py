"""What a benchmark measures, and what comes out: cases, rows, and what to say about them.

Measuring itself is in measure.py; nothing here loads torch.
"""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Annotated, Literal, get_type_hints

from gguf_pp.config import RuntimeConfig
from gguf_pp.net import is_remote
from gguf_pp.pipeline.split import split_evenly
from gguf_pp.timeline import Waiting

IDLE_WORTH_SAYING = 0.1
"""Share of idle device time below which there is nothing to advise."""
SLOWER_WORTH_SAYING = 1.05
"""A split that promises less speed-up than this is not worth a suggestion."""
NO_GAIN = 1.03
"""A speed-up below this is none, however well repetitions agree."""
NO_GAIN_ONCE = 1.1
"""The same where there was only one repetition."""
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
    """`config` on the first of its devices, a worker that is named as a whole in turns."""
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
        float | None, "against the first of --device alone (--baseline), or null"
    ]
    busy_share: Annotated[tuple[float, ...], "share of the time in which each device computed"]
    bubble_share: Annotated[float, "share of device time without work: 1 - sum(busy) / (P span)"]
    bubble_predicted: Annotated[
        float, "(P-1)/(M+P-1) for M ubatches; 1 - G/P where only G < P are in flight"
    ]
    waiting_starved: Annotated[float | None, "share of waiting with nothing to run; null if none"]
    waiting_uneven: Annotated[float | None, "share of waiting for a slower stage"]
    waiting_transfer: Annotated[float | None, "share of waiting for a transfer"]
    edges: Annotated[
        tuple[str, ...], "A to B, the way through the devices; ends of the model may add to it"
    ]
    bytes_per_edge: Annotated[
        tuple[int, ...], "bytes of hidden states on each of them, in one run; once if relayed"
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


def faster_layers(busy: Sequence[float], layers: Sequence[int]) -> tuple[int, ...] | None:
    """Layers per device that would even out `busy` (seconds or shares of each device).

    On a device all layers count the same. None if that promises nothing worth it.
    """
    if min(busy) <= 0:
        return None
    speeds = [n / seconds for n, seconds in zip(layers, busy, strict=True)]
    better = [len(part) for part in split_evenly([1] * sum(layers), speeds)]
    slowest = max(n / speed for n, speed in zip(better, speeds, strict=True))
    return tuple(better) if slowest * SLOWER_WORTH_SAYING < max(busy) else None


@dataclass(frozen=True, slots=True)
class Advice:
    """What keeps devices idle, and one or more things to try."""

    cause: str
    remedies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.cause}: try {', or '.join(self.remedies)}"

    def without(self, tried: Container[str]) -> "Advice | None":
        """The same less what was tried already; None if nothing is left."""
        left = tuple(remedy for remedy in self.remedies if remedy not in tried)
        return Advice(self.cause, left) if left else None


MORE_COPIES = "more copies (--n-copies)"
MORE_STREAMS = "more streams"
SMALLER_UBATCHES = "smaller ubatches (-ub)"
LARGER_UBATCHES = "larger ubatches (-ub)"
FEWER_DEVICES = "fewer devices"


def layers_flag(devices: Sequence[str], layers: Sequence[int]) -> str:
    """The flag for these numbers of layers, as a remedy.

    It counts devices as --device names them: a worker may have been named as a whole.
    """
    flag = f"--layers {','.join(map(str, layers))}"
    return f"--device {','.join(devices)} {flag}" if any(map(is_remote, devices)) else flag


def advice(
    waiting: Waiting,
    bubble: float,
    busy: Sequence[float],
    n_copies: int,
    devices: Sequence[str],
    layers: Sequence[int],
) -> Advice | None:
    """What to do about the cause that dominates; None if nothing is worth it.

    `busy` are seconds or shares of each device.
    """
    if len(busy) < 2 or bubble < IDLE_WORTH_SAYING:
        return None
    if waiting.main_cause == "starved":
        if n_copies == 1:
            return Advice("one ubatch is in flight, devices take turns", ("--n-copies 2",))
        cause = f"too little is in flight for {len(busy)} devices"
        return Advice(cause, (MORE_STREAMS, SMALLER_UBATCHES))
    if waiting.main_cause == "transfer":
        return Advice("devices wait for transfers", (FEWER_DEVICES, LARGER_UBATCHES))
    return _even_out(busy, devices, layers)


def _even_out(busy: Sequence[float], devices: Sequence[str], layers: Sequence[int]) -> Advice:
    slow, fast = max(busy), min(busy)
    better = faster_layers(busy, layers)
    if better is None or fast <= 0:
        return Advice("stages are even on average but vary", (MORE_COPIES,))
    cause = f"{devices[busy.index(slow)]} is {slow / fast:.1f} times slower"
    return Advice(cause, (layers_flag(devices, better),))


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, in plain sentences that agree with each other.

    What rows differ by counts before what the waiting of one suggests: nothing is suggested that
    was measured and did not help.
    """
    tests = dict.fromkeys((row.test, row.devices) for row in rows if len(row.devices) > 1)
    several = len({devices for _, devices in tests}) > 1
    said, advised = [], []
    for test, devices in tests:
        alike = [row for row in rows if row.test == test]
        if alike[0].n_gen and alike[0].parallel == 1:
            n = len(devices)
            said.append(f"decode of one stream is sequential: {n} devices cannot speed it up")
        elif piped := [row for row in alike if row.devices == devices and row.pipeline]:
            row = _fewest_copies(piped)
            subject = f"{test} on {','.join(devices)}" if several else test
            hint = _advice(row, rows)
            said += _finding(row, alike, subject, filled=hint is None)
            if hint is not None:
                advised.append((row.bubble_share, f"{subject}: {hint}"))
    # Only for the test that left devices idle the most: advice for two could disagree.
    said += [text for _, text in sorted(advised)[-1:]]
    return list(dict.fromkeys(said))


def _fewest_copies(piped: Sequence[Row]) -> Row:
    """The row to choose: the fastest, or one with fewer copies that is as fast."""
    fastest = max(piped, key=lambda row: row.tokens_per_s)
    enough = [r for r in piped if _but_for_copies(r, fastest) and not _faster(fastest, r)]
    return min(enough, key=lambda row: row.n_copies)


def _but_for_copies(row: Row, other: Row) -> bool:
    """Whether two rows of a test on the same devices differ in copies only."""

    def rest(row: Row) -> tuple[object, ...]:
        return row.layers_per_device, row.threads, row.n_prompt and row.ubatch_size

    return rest(row) == rest(other)


def _faster(row: Row, other: Row) -> bool:
    """Whether a row beats another by more than repetitions differ."""
    noise = math.hypot(row.tokens_per_s_sd, other.tokens_per_s_sd)
    least = NO_GAIN if noise else NO_GAIN_ONCE
    return row.tokens_per_s > max(least * other.tokens_per_s, other.tokens_per_s + noise)


def _finding(row: Row, alike: Sequence[Row], subject: str, *, filled: bool) -> Iterator[str]:
    """What comparing the chosen row with others of its test tells: at most one sentence."""
    no_slower = [r for r in alike if not r.pipeline and not _faster(row, r)]
    mine = [r for r in alike if r.devices == row.devices]
    if alone := [r for r in no_slower if len(r.devices) == 1]:
        yield f"{subject}: {alone[0].devices[0]} alone is no slower"
    elif any(r in no_slower for r in mine):
        yield f"{subject}: pipelining gains nothing over --n-copies 1"
    elif any(r.n_copies > row.n_copies and _but_for_copies(r, row) for r in mine if r.pipeline):
        if filled and row.bubble_share <= FILLED:
            what = f"{row.parallel} streams fill" if row.n_gen else f"{subject} fills"
            yield f"{what} {len(row.devices)} devices; more copies gain nothing"
        else:
            yield f"{subject}: more copies than {row.n_copies} gain nothing"


def _advice(row: Row, rows: Sequence[Row]) -> Advice | None:
    """What might help a row, less what is known not to."""
    found = advice(
        row.waiting,
        row.bubble_share,
        row.busy_share,
        row.n_copies,
        row.devices,
        row.layers_per_device,
    )
    return found and found.without(_tried(row, rows))


def _tried(chosen: Row, rows: Sequence[Row]) -> set[str]:
    """Remedies for a row that others show the effect of, or that cannot have one: decoding has
    ubatches of a row per stream."""
    decodes = chosen.n_gen > 0
    alike = [row for row in rows if row.test == chosen.test]
    piped = [row for row in alike if row.pipeline and row.devices == chosen.devices]
    phase = [row for row in rows if (row.n_gen > 0) == decodes]
    shown = {
        MORE_COPIES: any(row.n_copies > chosen.n_copies for row in piped),
        MORE_STREAMS: any(row.parallel > chosen.parallel for row in phase),
        SMALLER_UBATCHES: decodes or any(r.ubatch_size < chosen.ubatch_size for r in piped),
        LARGER_UBATCHES: decodes or any(r.ubatch_size > chosen.ubatch_size for r in piped),
        FEWER_DEVICES: any(len(row.devices) < len(chosen.devices) for row in alike),
    }
    shown |= {layers_flag(row.devices, row.layers_per_device): True for row in piped}
    return {remedy for remedy, known in shown.items() if known}
