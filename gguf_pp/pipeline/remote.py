"""Stages on another machine, driven by its worker: to the executor here they are one stage."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import torch

from gguf_pp.arch import Model
from gguf_pp.backend.base import Backend
from gguf_pp.batch import UBatch
from gguf_pp.config import RuntimeConfig
from gguf_pp.errors import RemoteError
from gguf_pp.gguf import ModelFile
from gguf_pp.gguf.identity import Identity
from gguf_pp.pipeline.executor import Take
from gguf_pp.pipeline.manifest import manifest
from gguf_pp.pipeline.memory import Rung
from gguf_pp.pipeline.peer import Peer, Pending, RemoteDevice, bytes_of, memory_of
from gguf_pp.pipeline.ring import Copy, Ring
from gguf_pp.pipeline.split import Part
from gguf_pp.pipeline.stage import DeviceUse
from gguf_pp.wire import MAX_CHUNK_BYTES, Fields, ProtocolError, Verb, pack_offset

_MAX_BYTES = 1 << 50


class RemoteStage:
    """Consecutive parts of the model on devices of one worker.

    It sends on one stream and receives on another, so that as many ubatches are on their way as the
    worker has copies. `backend` stands for this machine: its buffers are what is sent and received.
    Linked to the stage before or behind, hidden states go from worker to worker and not through
    here; the first of linked stages then announces each ubatch to all of them.
    """

    def __init__(
        self,
        i_stage: int,
        peer: Peer,
        places: Sequence[tuple[RemoteDevice, Part]],
        model: Model,
        config: RuntimeConfig,
        backend: Backend,
    ) -> None:
        self.peer = peer
        self.backend = backend
        self.parts = [part for _, part in places]
        self.intake = backend.stream(f"stage {i_stage} send")
        self.compute = backend.stream(f"stage {i_stage} receive")
        self.transfer = None if self.heads else backend.stream(f"stage {i_stage} transfer")
        self.ring: Ring
        self.weight_bytes = 0
        self.scratch_bytes = 0
        self.overhead_rows = 1
        self.n_threads = sum(device.n_threads for device, _ in places)
        self.elapsed_s: float | None = 0.0
        self.recents: list[deque[tuple[int, int, float]]] = [
            deque(maxlen=64) for part in self.parts if part.layers
        ]
        self.origin = ""
        self._devices = [device for device, _ in places]
        self._model = model
        self._config = config
        self._missing: tuple[int, ...] = ()
        self._names: list[str] = []
        self._uses: list[DeviceUse] = []
        self._linked_from: RemoteStage | None = None
        self._linked_to: RemoteStage | None = None
        self._ids = count()
        self._pending: dict[int, Pending] = {}
        self._ended_s = 0.0
        self._row_bytes = model.hp.n_embd * (2 if config.wire == "f16" else 4)
        self._halves: list[torch.Tensor] = []

    @property
    def name(self) -> str:
        """The devices."""
        return "+".join(device.name for device in self._devices)

    @property
    def layers(self) -> range:
        """Layers of all its devices."""
        return range(self.parts[0].layers.start, self.parts[-1].layers.stop)

    @property
    def embeds(self) -> bool:
        """Whether tokens go in, not hidden states."""
        return self.parts[0].embeds

    @property
    def heads(self) -> bool:
        """Whether logits come out, not hidden states."""
        return self.parts[-1].heads

    @property
    def kernels(self) -> str:
        """What computes."""
        return "+".join(sorted({use.kernels for use in self._uses}))

    @property
    def kv_bytes(self) -> int:
        """On all its devices."""
        return sum(use.kv_bytes for use in self._uses)

    def uses(self) -> list[DeviceUse]:
        """What each device holds."""
        return self._uses

    def open(self, file: ModelFile, identity: Identity, n_vocab: int) -> None:
        """Declare the stage, for which the worker reserves the weights.

        Raises OutOfMemory, RemoteError, UnsupportedError.
        """
        self.peer.n_stages, self.peer.n_vocab = len(self.parts), n_vocab
        places = [(d.name_there, p) for d, p in zip(self._devices, self.parts, strict=True)]
        body, self._names = manifest(file, identity, self._model, places, self._config, n_vocab)
        answer = self.peer.request(Verb.OPEN, body, doing=f"preparing {self._what}")
        with self.peer.understood():
            self._note_opened(answer)

    def _note_opened(self, answer: Fields) -> None:
        self._missing = answer.integers("missing", len(self._names), 0, len(self._names) - 1)
        self.origin = answer.choice("origin", "model-dir", "cache", "client")
        self.overhead_rows = answer.integer("overhead_rows", 1, 1 << 16)
        sizes = _per_stage(answer, "weight_bytes", len(self.parts))
        kernels = [str(kind)[:16] for kind in answer.items("kernels", len(self.parts))]
        if len(kernels) != len(self.parts):
            raise ProtocolError(f"{len(kernels)} kernels for {len(self.parts)} stages")
        self.weight_bytes = sum(sizes)
        self._uses = [
            DeviceUse(device.name, (p.layers.start, p.layers.stop), size, 0, 0, 0, kind)
            for device, p, size, kind in zip(self._devices, self.parts, sizes, kernels, strict=True)
        ]

    @property
    def _what(self) -> str:
        return f"layers {self.layers.start} to {self.layers.stop - 1}"

    def link(self, following: "RemoteStage") -> bool:
        """Have the worker hand hidden states to that of `following`, if it can reach it."""
        if self.peer is following.peer or not self.peer.link_to(following.peer):
            return False
        self._linked_to, following._linked_from = following, self
        return True

    def settle(self) -> None:
        """Wait until nothing of earlier ubatches is queued here."""
        for stream in (self.intake, self.compute, self.transfer):
            if stream is not None:
                settled = self.backend.event()
                stream.record(settled)
                settled.synchronize()

    def reset(self) -> None:
        """Forget the session before: the peer has begun a new one."""
        self.ring.release()
        self._linked_from = self._linked_to = None
        self._pending.clear()

    def allocate(self, rung: Rung, n_slots: int, kv_types: tuple[str, str]) -> None:
        """Reserve KV cache and buffers there, and what is sent and received here; raises
        OutOfMemory. `release` undoes it, whole or half done."""
        self.ring = Ring(
            self.backend,
            rung.n_copies,
            rung.ubatch_size,
            self._model.hp.n_embd,
            inp=not (self.embeds or self._linked_from),
            out=not (self.heads or self._linked_to),
        )
        if self._config.wire == "f16":
            shape = (rung.ubatch_size, self._model.hp.n_embd)
            self._halves = [torch.empty(shape, dtype=torch.float16) for _ in range(2)]
        sizes = {
            "n_copies": rung.n_copies,
            "ubatch_size": rung.ubatch_size,
            "ctx_size": rung.ctx_size,
        }
        answer = self.peer.request(Verb.ALLOCATE, sizes, doing=f"allocating for {self._what}")
        with self.peer.understood():
            kv, buffers, free = (
                _per_stage(answer, name, len(self.parts))
                for name in ("kv_bytes", "buffer_bytes", "free_bytes")
            )
        self._uses = [
            replace(use, kv_bytes=kv[i], buffer_bytes=buffers[i], free_bytes=free[i])
            for i, use in enumerate(self._uses)
        ]

    def release(self) -> None:
        """Give back everything but the weights."""
        if hasattr(self, "ring"):
            self.ring.release()
        self._halves = []
        self.peer.request(Verb.RELEASE, {}, doing="giving memory back")

    def load_weights(self, file: ModelFile, n_ctx: int, progress: Callable[[int], None]) -> None:
        """Send the tensors that the worker lacks, and have it load all. Raises RemoteError."""
        try:
            done = self._send_missing(file, progress)
        except RemoteError as exc:
            raise RemoteError(
                f"{exc} while taking the weights of {self._what}", hint=exc.hint
            ) from exc

        def step(fields: Fields) -> None:
            nonlocal done
            n_bytes = fields.integer("done_bytes", 0, _MAX_BYTES)
            if n_bytes > done:
                progress(n_bytes - done)
                done = n_bytes

        doing = f"loading {self._what}"
        self.peer.request(Verb.LOAD, {"n_ctx": n_ctx}, doing=doing, progress=step)

    def _send_missing(self, file: ModelFile, progress: Callable[[int], None]) -> int:
        """Send the tensors that the worker lacks; returns their bytes."""
        n_sent = 0
        for i_tensor in self._missing:
            data = memory_of(file.data(self._names[i_tensor]))
            for start in range(0, len(data), MAX_CHUNK_BYTES):
                piece = data[start : start + MAX_CHUNK_BYTES]
                self.peer.send(Verb.TENSOR, i_tensor, pack_offset(start), piece)
                n_sent += len(piece)
                progress(len(piece))
            file.forget(self._names[i_tensor])
        return n_sent

    def load(self, copy: Copy, ubatch: UBatch) -> None:
        """Send the input, once the worker has room for it."""
        if self._linked_from is not None:  # it comes from the worker before
            return
        id_ = next(self._ids)
        payload = None
        if copy.inp is not None:
            payload = self._packed(copy.inp.tensor[: ubatch.n_rows])
        try:
            self._announce(id_, ubatch, None)
            self.peer.submit(id_, ubatch, tokens=self.embeds, payload=payload)
        except RemoteError as exc:
            raise self._while_computing(exc) from exc

    def _announce(self, id_: int, ubatch: UBatch, before: Pending | None) -> None:
        """Make the stages that are linked to this one ready for a ubatch."""
        hidden = ubatch.n_rows * self._row_bytes
        n_logits = len(ubatch.outputs) if self.heads else 0
        pending = Pending(ubatch, 0 if self.heads or self._linked_to else hidden, n_logits)
        self._pending[id(ubatch)] = pending
        if before is not None:
            before.followers.append(pending)
        if self._linked_to is not None:
            self._linked_to._announce(id_, ubatch, pending)
        self.peer.expect(id_, pending)

    def _packed(self, x: torch.Tensor) -> memoryview:
        """Hidden states as they cross the wire."""
        if self._halves:
            half = self._halves[0][: x.shape[0]]
            half.copy_(x)
            x = half
        return bytes_of(x)

    def forward(self, copy: Copy, ubatch: UBatch, take: Take) -> None:
        """Receive the result."""
        pending = self._pending.pop(id(ubatch))
        try:
            if self.heads:
                pending.receive_logits(take)
            elif copy.out is None:
                pending.receive(None)
            else:
                self._receive(pending, copy.out.tensor[: ubatch.n_rows])
        except RemoteError as exc:
            raise self._while_computing(exc) from exc
        self._note(pending)

    def _receive(self, pending: Pending, out: torch.Tensor) -> None:
        if self._halves:
            half = self._halves[1][: out.shape[0]]
            pending.receive(bytes_of(half))
            out.copy_(half)
        else:
            pending.receive(bytes_of(out))

    def _while_computing(self, exc: RemoteError) -> RemoteError:
        return RemoteError(f"{exc}, while computing {self._what}", hint=exc.hint)

    def _note(self, pending: Pending) -> None:
        """Remember how long it took there."""
        now = time.perf_counter()
        ubatch, slowest = pending.ubatch, max(pending.seconds, default=0.0)
        self.elapsed_s = min(slowest, now - self._ended_s)
        self._ended_s = now
        timed = [s for s, part in zip(pending.seconds, self.parts, strict=True) if part.layers]
        for recent, seconds in zip(self.recents, timed, strict=True):
            recent.append((ubatch.n_rows, len(ubatch.outputs), seconds))

    def abandon(self, copy: Copy, ubatch: UBatch) -> None:
        """Let the worker's result of a ubatch go by, if it has it at all."""
        if (pending := self._pending.pop(id(ubatch), None)) is not None:
            pending.drop()


def _per_stage(answer: Fields, name: str, n_stages: int) -> tuple[int, ...]:
    numbers = answer.integers(name, n_stages, 0, _MAX_BYTES)
    if len(numbers) != n_stages:
        raise ProtocolError(f"{len(numbers)} {name} for {n_stages} stages")
    return numbers
