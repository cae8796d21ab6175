"""A client without torch: it declares what was prepared for it, and sends tokens.

    python -m tests.light ADDRESS PREPARED.json MOMENT

kills itself at a moment: "load", "prefill", "decode" or "idle".
"""

import json
import os
import queue
import signal
import sys
from pathlib import Path
from typing import Any

from gguf_pp.batch import Span, UBatch
from gguf_pp.gguf import ModelFile
from gguf_pp.net import connect
from gguf_pp.wire import Fields, Frame, Verb, pack_offset, pack_ubatch

WAIT_S = 60
CTX_SIZE = 128
MOMENTS = ("load", "prefill", "decode", "idle")


class Light:
    """A session; `frames` are (frame, payload) that came and are not answers."""

    def __init__(self, address: str, timeout_s: float = 15.0) -> None:
        host, _, port = address.rpartition(":")
        self.frames: queue.Queue[tuple[Frame, bytes] | None] = queue.Queue()
        self.error: Exception | None = None
        self._payload = memoryview(b"")
        self.connection, _ = connect(host, int(port), self, timeout_s=timeout_s)
        self.connection.start()

    def payload_for(self, frame: Frame) -> memoryview:
        self._payload = memoryview(bytearray(frame.n_payload))
        return self._payload

    def handle(self, frame: Frame) -> None:
        self.frames.put((frame, bytes(self._payload) if frame.n_payload else b""))

    def lost(self, error: Exception) -> None:
        self.error = error
        self.frames.put(None)

    def ask(self, verb: Verb, **body: Any) -> Fields:
        return self.connection.request(verb, body, doing="a test", timeout_s=WAIT_S)

    def free_bytes(self) -> int:
        return self.ask(Verb.INFO).objects("devices", 64)[0].integer("free_bytes")

    def open(self, prepared: dict[str, Any], n_copies: int = 2) -> Fields:
        answer = self.ask(Verb.OPEN, **prepared["open"])
        self.ask(Verb.ALLOCATE, n_copies=n_copies, ubatch_size=16, ctx_size=CTX_SIZE)
        return answer

    def send_tensors(self, prepared: dict[str, Any], missing: list[int]) -> None:
        with ModelFile.open(prepared["path"]) as file:
            for i in missing:
                name = prepared["open"]["tensors"][i][0]
                data = memoryview(file.data(name).reshape(-1))
                self.connection.send(Verb.TENSOR, i, pack_offset(0), data, wait=True)

    def load(self, prepared: dict[str, Any]) -> None:
        """Everything up to where ubatches may be sent."""
        missing = list(self.open(prepared).integers("missing", 1 << 10))
        self.send_tensors(prepared, missing)
        self.ask(Verb.LOAD, n_ctx=CTX_SIZE)
        assert self.next(Verb.CREDIT).id == 2

    def next(self, verb: Verb) -> Frame:
        """The next frame of this kind; others are dropped."""
        while (got := self.frames.get(timeout=WAIT_S)) is not None:
            if got[0].verb is verb:
                return got[0]
        raise AssertionError(self.error)

    def submit(self, id_: int, tokens: list[int], start: int) -> None:
        n = len(tokens)
        ubatch = UBatch(tuple(tokens), (Span(0, start, n),), (n - 1,))
        self.connection.send(Verb.SUBMIT, id_, pack_ubatch(ubatch, tokens=True))

    def close(self) -> None:
        self.connection.close()


def die_at(moment: str, address: str, prepared: dict[str, Any]) -> None:
    client = Light(address)
    if moment == "load":
        missing = list(client.open(prepared).integers("missing", 1 << 10))
        client.send_tensors(prepared, missing[: len(missing) // 2])
    else:
        client.load(prepared)
        if moment != "idle":
            client.submit(0, list(range(32, 48)), 0)
            client.submit(1, list(range(48, 64)), 16)
        if moment == "decode":
            client.next(Verb.DONE)
            client.next(Verb.DONE)
            client.submit(2, [65], 32)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_at(sys.argv[3], sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
