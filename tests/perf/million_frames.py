"""Random and mutated frames against a live worker, while a good client generates on it.

    python tests/perf/million_frames.py [--frames 1000000]

Each connection shakes hands, sends frames that are odd but allowed (heartbeats with noise, requests
with unknown fields), and ends with one that is mutated or random. Prints what was sent, how often
the good client was served and whether always right, and the memory of the worker.
"""

import argparse
import multiprocessing as mp
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gguf_pp
from gguf_pp.errors import RemoteError
from gguf_pp.net import dial, greet_server
from gguf_pp.net.channel import Lost
from gguf_pp.wire import Verb, pack_header, pack_json
from tests.conftest import write_chat_model
from tests.workers import WorkerProcess

N_ALLOWED, MAX_REQUESTS, TIMEOUT_S = 60, 10, 10.0
OPEN = {
    "identity": {"sizes": [5], "digest": "a" * 64},
    "metadata": {},
    "tensors": [],
    "stages": [{"device": "cpu", "layers": [0, 1]}],
    "embeds": False,
    "heads": False,
    "n_slots": 1,
    "kv_types": ["f16", "f16"],
    "kernels": "auto",
    "exact": False,
    "n_vocab": 9,
    "wire": "f32",
    "label": "x",
}


def frame(verb: Verb, id_: int, meta: bytes = b"", payload: bytes = b"") -> bytes:
    return pack_header(verb, id_, len(meta), len(payload)) + meta + payload


GOOD = [
    frame(Verb.OPEN, 1, pack_json(OPEN)),
    frame(Verb.SUBMIT, 3, bytes(40), bytes(64)),
    frame(Verb.TENSOR, 2, bytes(8), bytes(99)),
    frame(Verb.JOIN, 4, pack_json({"token": "0" * 64})),
    frame(Verb.ALLOCATE, 5, pack_json({"n_copies": 2, "ubatch_size": 4, "ctx_size": 64})),
    frame(Verb.CREDIT, 1),
    frame(Verb.INFO, 9, pack_json({})),
]


def allowed(rng: random.Random) -> Iterator[bytes]:
    """Frames that a worker answers or ignores."""
    n_requests = 0
    for _ in range(N_ALLOWED):
        kind = rng.random()
        if kind < 0.2 and n_requests < MAX_REQUESTS:
            n_requests += 1
            if kind < 0.1:
                fields = {f"k{rng.getrandbits(20)}": rng.choice([None, 1, "x", [1], {}])}
                yield frame(Verb.INFO, rng.getrandbits(31), pack_json(fields))
            else:
                noise = rng.randbytes(rng.randrange(1, 200))
                yield frame(Verb.SINK, rng.getrandbits(31), b"{}", noise)
        else:
            yield frame(Verb.PING, rng.getrandbits(32), rng.randbytes(rng.randrange(80)))


def mutated(rng: random.Random) -> bytes:
    """A good frame with a few bytes changed, cut or added; or noise."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(20, 300))
    data = bytearray(rng.choice(GOOD))
    for _ in range(rng.randrange(1, 6)):
        i, how = rng.randrange(len(data)), rng.random()
        if how < 0.6:
            data[i] = rng.getrandbits(8)
        elif how < 0.8:
            del data[i : min(i + rng.randrange(1, 5), len(data) - 1)]
        else:
            data[i:i] = rng.randbytes(rng.randrange(1, 5))
    return bytes(data)


def attack(port: int, seed: int, n_frames: int, said: "mp.Queue[tuple[int, int]]") -> None:
    rng, n_sent, n_connections = random.Random(seed), 0, 0
    while n_sent < n_frames:
        with suppress(RemoteError, Lost, OSError):
            channel = dial("127.0.0.1", port, TIMEOUT_S)
            try:
                greet_server(channel, None, TIMEOUT_S)
                frames = [*allowed(rng), mutated(rng)]
                channel.send([b"".join(frames)], time.monotonic() + TIMEOUT_S)
                n_sent, n_connections = n_sent + len(frames), n_connections + 1
                channel._sock.shutdown(socket.SHUT_WR)
                while True:
                    channel.recv(1, time.monotonic() + TIMEOUT_S)
            finally:
                channel.close()
    said.put((n_sent, n_connections))


def resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    n_frames = parser.parse_args().frames
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = write_chat_model(Path(folder) / "model.gguf")
        worker = WorkerProcess("--device", "cpu", "--cache", f"{folder}/cache")
        with gguf_pp.load(path, ["cpu", worker.device], ctx_size=256, timeout=60) as llm:

            def answer() -> list[int]:
                return llm.generate("Once", max_tokens=40, temperature=0).completion().ids

            wanted, before, start = answer(), resident_mib(worker.process.pid), time.monotonic()
            said = context.Queue()
            tasks = [
                context.Process(target=attack, args=(worker.port, seed, n_frames // 2, said))
                for seed in range(2)
            ]
            for task in tasks:
                task.start()
            answers = []
            while any(task.is_alive() for task in tasks):
                answers.append(answer() == wanted)
            sent = [said.get() for _ in tasks]
            after, seconds = resident_mib(worker.process.pid), time.monotonic() - start
        print(
            f"{sum(n for n, _ in sent):,} frames on {sum(n for _, n in sent):,} connections in "
            f"{seconds:.0f} s; good client right {sum(answers)} of {len(answers)} times; worker "
            f"{'alive' if worker.process.poll() is None else 'DEAD'}, {before} -> {after} MiB, "
            f"{sum('Traceback' in line for line in worker.log)} tracebacks"
        )
        worker.kill()


if __name__ == "__main__":
    main()
