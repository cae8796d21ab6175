"""The Python interface: load a model, generate, look at logits. The command line uses nothing else.

with gguf_pp.load("model.gguf", devices=["cpu:0", "cpu:1"]) as llm:
    for piece in llm.generate("The capital of France is", max_tokens=16, temperature=0):
        print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from gguf_pp import arch, fetch
from gguf_pp.config import Options, resolve
from gguf_pp.errors import ConfigError, FormatError, TemplateError
from gguf_pp.gguf import ModelFile
from gguf_pp.request import FinishReason, Request
from gguf_pp.sampling import SamplingOptions, SamplingParams
from gguf_pp.text import TextStream
from gguf_pp.timeline import Lane, lanes_of
from gguf_pp.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from gguf_pp.backend.trace import Trace
    from gguf_pp.engine import Engine
    from gguf_pp.pipeline.stage import DeviceUse

Prompt = str | Sequence[int]
Progress = Callable[[int, int], None]


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of config.Options, beside `device`."""

    split_mode: str
    tensor_split: str | None
    layers: str | None
    main_gpu: int
    n_gpu_layers: str | None
    n_copies: int | None
    ctx_size: int | None
    batch_size: int
    ubatch_size: int | None
    parallel: int
    run_ahead: int | None
    cache_type_k: str
    cache_type_v: str
    threads: str | None
    kernels: str
    exact: bool
    memory: str | None
    edge_copy: str
    cuda_graphs: bool
    override_kv: tuple[str, ...]
    rpc: str | None
    wire: str
    timeout: float
    secret_file: str | None
    tls_ca: str | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. Rates are tokens per second, None where nothing was timed.

    `finish_reason`: "stop" (end of generation or a stop string), "length", "cancelled".
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: FinishReason
    first_token_s: float | None
    prompt_tokens: int
    prompt_tokens_per_s: float | None
    decode_tokens: int
    decode_tokens_per_s: float | None


class Generation(Iterator[str]):
    """Pieces of text as they are made; iterate, then ask for `completion()`.

    Dropping it early does not stop the work: use `cancel()`, or `with`.
    """

    def __init__(self, engine: Engine, request: Request, stream: TextStream) -> None:
        self._engine = engine
        self._request = request
        self._stream = stream
        self._n_read = 0
        self._text: list[str] = []
        self._flushed = False
        self._interrupted = False

    def __next__(self) -> str:
        """The next piece that is not empty. Raises what made the request fail."""
        while not self._flushed:
            if piece := self._read():
                self._text.append(piece)
                return piece
        raise StopIteration

    def _read(self) -> str:
        request = self._request
        while len(request.generated) <= self._n_read and request.finish_reason is None:
            if self._interrupted:
                self._engine.cancel(request)
            else:
                self._engine.step()
        if self._n_read < len(request.tokens) - len(request.prompt) and not self._stream.stopped:
            token = request.tokens[len(request.prompt) + self._n_read]
            self._n_read += 1
            piece = "" if token in self._engine.eog_ids else self._stream.push(token)
            if self._stream.stopped:
                self._engine.cancel(request)
            return piece
        self._flushed = True
        if request.error is not None:
            raise request.error
        return self._stream.flush()

    def cancel(self) -> None:
        """Stop generating; what was made stays readable."""
        self._engine.cancel(self._request)

    def interrupt(self) -> None:
        """Have whoever iterates cancel before the next step; for signal handlers and threads."""
        self._interrupted = True

    def completion(self) -> Completion:
        """Run to the end and return everything at once."""
        for _ in self:
            pass
        request = self._request
        ids = request.tokens[len(request.prompt) :][: self._n_read]
        n_prompt = len(request.prompt) - request.n_cached
        prompt_s = request.first_token_s - request.started_s if ids else 0.0
        decode_s = request.finished_s - request.first_token_s if ids else 0.0
        reason = request.finish_reason or "cancelled"
        return Completion(
            text="".join(self._text),
            ids=ids,
            prompt_ids=list(request.prompt),
            finish_reason="stop" if self._stream.stopped else reason,
            first_token_s=request.first_token_s - request.added_s if ids else None,
            prompt_tokens=n_prompt,
            prompt_tokens_per_s=n_prompt / prompt_s if prompt_s > 0 else None,
            decode_tokens=max(0, len(ids) - 1),
            decode_tokens_per_s=(len(ids) - 1) / decode_s if len(ids) > 1 else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class LLM:
    """A loaded model; a context manager. Not for use from several threads at once."""

    def __init__(self, path: str | os.PathLike[str], options: Options, progress: Progress) -> None:
        config = resolve(options)
        self.notes = config.notes
        self._file = ModelFile.open(path, config.override_kv)
        # Before the tokenizer: what cannot run at all often has another kind of vocabulary too.
        self._file.require_model()
        arch.build(self._file.metadata)
        self._tokenizer = Tokenizer.from_metadata(self._file.metadata)
        _check_vocabulary(self._file, self._tokenizer)
        # Here, because what is wrong with a file should not be told seconds later, after torch.
        from gguf_pp.engine import Engine
        from gguf_pp.pipeline.build import Pipeline

        self._pipeline = Pipeline(self._file, config, progress)
        self._engine = Engine(self._pipeline, self._tokenizer.eog_ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def ctx_size(self) -> int:
        """Cells of each sequence: prompt and answer together."""
        return self._pipeline.rung.ctx_size

    @property
    def ctx_train(self) -> int:
        """The context that the model was trained for."""
        return self._pipeline.model.hp.n_ctx_train

    @property
    def n_copies(self) -> int:
        """Rotating copies per stage; 1 is not pipelined."""
        return self._pipeline.rung.n_copies

    @property
    def not_pipelined_because(self) -> str:
        """Why pipelining is off; empty if it is on."""
        return self._pipeline.reason

    @property
    def n_groups(self) -> int:
        """Groups of sequences that the engine last chose to decode at once."""
        return self._engine.n_groups

    @property
    def trace(self) -> Trace:
        """What ran when, once its `enabled` is set; read it when nothing is in flight."""
        return self._pipeline.trace

    def devices(self) -> list[DeviceUse]:
        """What each device holds, in the order of its layers."""
        return self._pipeline.uses()

    def lanes(self) -> tuple[Lane, ...]:
        """The stages that `trace` numbers."""
        return lanes_of(self._pipeline.stages)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`, with BOS if the model wants one; `special` parses control tokens."""
        return self._tokenizer.encode(text, special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens left out."""
        return self._tokenizer.decode(ids)

    def chat_prompt(
        self, messages: Sequence[dict[str, str]], template: str | None = None
    ) -> list[int]:
        """Ids of a conversation, rendered by `template` or the model's own chat template.

        Messages are {"role": ..., "content": ...}. Raises TemplateError.
        """
        source = template or self._tokenizer.chat_template
        if source is None:
            raise TemplateError(
                "the model has no chat template", hint="give one with --chat-template-file"
            )
        # Here, because most programs that generate do not chat, and need no Jinja.
        from gguf_pp.tokenizer import ChatTemplate

        chat = ChatTemplate(source, bos=self._tokenizer.bos_text, eos=self._tokenizer.eos_text)
        return self._tokenizer.encode_chat(chat.render(messages))

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Continue `prompt` (text, or ids). -1 tokens is until the model or the context ends.

        Raises RequestError for a prompt that cannot be served, ConfigError for bad sampling.
        """
        if max_tokens < -1:
            raise ConfigError(f"cannot generate {max_tokens} tokens", hint="-1 is until the end")
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        request = self._engine.add(ids, SamplingParams(**sampling), max_tokens)
        return Generation(self._engine, request, TextStream(self._tokenizer, stop))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Continue several prompts together; results in their order.

        As many run at once as there are slots (`parallel`); every text is what it would be alone.
        """
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                generations.append(
                    self.generate(prompt, max_tokens=max_tokens, stop=stop, **sampling)
                )
            return [generation.completion() for generation in generations]
        finally:
            for generation in generations:
                generation.cancel()

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the token after each of `ids`, which start at position 0: float32 [T, V]."""
        out = np.empty((len(ids), self._pipeline.n_vocab), dtype=np.float32)

        def take(logits: Tensor, rows: range) -> None:
            out[rows.start : rows.stop] = logits.numpy()

        self._engine.evaluate(ids, take)
        return out

    def log_probabilities(
        self, ids: Sequence[int], n_top: int = 0
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        """How likely each next token was, without keeping logits.

        Returns the log-probability of ids[t + 1] after ids[: t + 1], float32 [T - 1]; and the
        `n_top` best ids [T - 1, n_top] and their log-probabilities, best first.
        """
        import torch

        n = len(ids) - 1
        n_top = min(n_top, self._pipeline.n_vocab)
        of_next = np.empty(max(n, 0), dtype=np.float32)
        top_ids = np.empty((max(n, 0), n_top), dtype=np.int64)
        top_values = np.empty((max(n, 0), n_top), dtype=np.float32)

        def take(logits: Tensor, rows: range) -> None:
            rows = range(rows.start, min(rows.stop, n))
            if not rows:
                return
            where = slice(rows.start, rows.stop)
            values = logits[: len(rows)].double()
            values -= values.logsumexp(dim=-1, keepdim=True)
            following = torch.tensor(ids[rows.start + 1 : rows.stop + 1])
            of_next[where] = values.gather(1, following[:, None])[:, 0].numpy()
            best = values.topk(n_top, dim=-1)
            top_ids[where], top_values[where] = best.indices.numpy(), best.values.numpy()

        self._engine.evaluate(ids, take)
        return of_next, top_ids, top_values

    def close(self) -> None:
        """Cancel what runs, stop the devices and close the file. Safe to call twice."""
        self._engine.close()
        self._pipeline.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_vocabulary(file: ModelFile, tokenizer: Tokenizer) -> None:
    """Refuse a model whose tokens are not the rows of its embedding; raises FormatError."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding and tokenizer.n_vocab not in (0, embedding.shape[0]):
        raise FormatError(
            f"{file.path}: the vocabulary has {tokenizer.n_vocab} tokens, "
            f"the embedding {embedding.shape[0]} rows"
        )


def load(
    model: str | os.PathLike[str],
    devices: Sequence[str] | None = None,
    *,
    progress: Progress = lambda done, total: None,
    **options: Unpack[LoadOptions],
) -> LLM:
    """Load a model: a path, or a known name, which is downloaded on first use.

    `devices` in pipeline order, such as ["cpu:0", "cpu:1"]; further options are those of
    config.Options. `progress` is told bytes of weights read so far and in all. Raises
    GgufPpError: what is wrong and what to do.
    """
    known = {field.name for field in fields(Options)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"no option {unknown[0]!r}", hint=f"known: {', '.join(sorted(known))}")
    device = None if devices is None else ",".join(devices)
    return LLM(fetch.resolve(model), Options(device=device, **options), progress)
