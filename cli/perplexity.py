"""`gguf-pp perplexity`: how well a model predicts a text."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from gguf_pp.errors import ConfigError, RequestError

from .console import Misuse, progress
from .flags import EngineFlags
from .session import Session, finite, open_session, placement, print_json, read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gguf_pp.api import LLM

DEFAULT_CTX_SIZE = 512


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the text that is evaluated on its own: `ids`, of which ids[t + 1] is the text's
    token number `first` + t."""

    ids: list[int]
    first: int


def cut_windows(ids: Sequence[int], bos: Sequence[int], ctx_size: int) -> list[Window]:
    """Cut `ids`, which have no BOS, into windows of `ctx_size` that begin with `bos`, [id] or [].

    A window predicts all its tokens but the first; a last one of a single token is left out.
    """
    step = ctx_size - len(bos)
    if step < 1 or ctx_size < 2:
        raise ConfigError(f"a context of {ctx_size} predicts nothing", hint="raise -c")
    windows = [
        Window([*bos, *ids[start : start + step]], start + 1 - len(bos))
        for start in range(0, len(ids), step)
    ]
    return [window for window in windows if len(window.ids) >= 2]


def perplexity(
    engine: EngineFlags,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", metavar="FILE", help="A UTF-8 text; - is stdin."),
    ],
    logprobs: Annotated[
        tuple[int, Path] | None,
        typer.Option(
            "--logprobs",
            metavar="K FILE",
            help="Write each token's log-probability and the K best, as JSON lines; - is stdout.",
            show_default=False,
        ),
    ] = None,
    special: Annotated[
        bool, typer.Option("--special", help="Find control tokens, such as <s>, in the text.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Measure how well a model predicts a text.

    The text is cut into windows of the context (-c, 512 unless given), each computed on its own
    and begun with BOS if the model wants one. Every token but the first of each window is scored;
    a last window of fewer than 2 tokens is left out. Positions count the text's tokens from 0, BOS
    not among them.
    """
    options = engine.options(default_ctx_size=DEFAULT_CTX_SIZE)
    n_top, out = (0, None) if logprobs is None else logprobs
    if n_top < 0:
        raise Misuse(f"--logprobs {n_top}: the number of best tokens cannot be negative")
    if as_json and out is not None and str(out) == "-":
        raise Misuse("--json and --logprobs K - both write to stdout")
    text = read_text(file)
    with open_session(engine, options) as session:
        windows = _windows(session.llm, text, special=special)
        n_vocab = session.llm.tokenizer.n_vocab
        if n_top > n_vocab:
            raise ConfigError(f"--logprobs {n_top}: the vocabulary has {n_vocab} tokens")
        start = time.perf_counter()
        with written(out) as lines:
            scores = _score(session.llm, windows, n_top, lines)
        _report(session, windows, scores, time.perf_counter() - start, as_json=as_json)


def _windows(llm: "LLM", text: str, *, special: bool) -> list[Window]:
    tokenizer = llm.tokenizer
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = tokenizer.encode(text, special=special, add_bos=False)
    windows = cut_windows(ids, bos, llm.ctx_size)
    if not windows:
        raise RequestError(
            f"the text has {len(ids)} tokens, too few to predict one from another",
            hint="give a longer text",
        )
    return windows


def _score(
    llm: "LLM", windows: Sequence[Window], n_top: int, lines: TextIO | None
) -> "list[NDArray[np.float32]]":
    """Log-probabilities of what each window scores, which also go to `lines` with the best."""
    n_tokens = sum(len(window.ids) for window in windows)
    done = 0
    scores = []
    with progress("evaluating tokens", in_bytes=False) as update:
        for window in windows:
            update(done, n_tokens)
            values, top_ids, top_values = llm.log_probabilities(window.ids, n_top)
            scores.append(values)
            done += len(window.ids)
            for i, value in enumerate(values if lines is not None else ()):
                best = zip(top_ids[i].tolist(), map(_exact, top_values[i]), strict=True)
                line = {
                    "position": window.first + i,
                    "id": window.ids[i + 1],
                    "logprob": _exact(value),
                    "top": list(best),
                }
                print(json.dumps(line, allow_nan=False), file=lines)
    return scores


def _exact(value: "np.float32") -> float | None:
    """The shortest number that is this float32 again; None for what JSON has no number for."""
    return finite(float(f"{value:.9g}"))


def _report(
    session: Session,
    windows: Sequence[Window],
    scores: "Sequence[NDArray[np.float32]]",
    seconds: float,
    *,
    as_json: bool,
) -> None:
    n_scored = sum(len(part) for part in scores)
    nll = -sum(float(part.sum(dtype=float)) for part in scores) / n_scored
    ppl = math.exp(nll) if nll < 700 else math.inf
    rate = sum(len(window.ids) for window in windows) / seconds
    if as_json:
        result = {"nll": finite(nll), "perplexity": finite(ppl), "tokens": n_scored}
        result |= {"windows": len(windows), "ctx_size": session.llm.ctx_size}
        result |= {"load_s": session.load_s, "seconds": seconds, "tokens_per_s": rate}
        print_json({**result, **placement(session.llm)})
        return
    print(f"nll {nll:.6f} perplexity {ppl:.4f}")
    print(
        f"{n_scored} tokens scored in {len(windows)} windows of {session.llm.ctx_size}, "
        f"{rate:.2f} tokens/s",
        file=sys.stderr,
    )


@contextmanager
def written(path: Path | None) -> Iterator[TextIO | None]:
    """Lend a file that takes the place of `path` only when all is written; - is stdout.

    Raises ConfigError if it cannot be written.
    """
    if path is None:
        yield None
    elif str(path) == "-":
        yield sys.stdout
    elif path.exists() and not path.is_file():  # a pipe or a device is not to be replaced
        with _opened(path, "w", path) as out:
            yield out
    else:
        temp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        with _opened(temp, "x", path) as out:
            try:
                yield out
            except BaseException:
                temp.unlink()
                raise
        temp.replace(path)


def _opened(file: Path, mode: str, path: Path) -> TextIO:
    """Open `file` to write what is to be at `path`; raises ConfigError."""
    try:
        return file.open(mode, encoding="utf-8")  # type: ignore[return-value]
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
