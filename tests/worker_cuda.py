"""Workers in this process that lend CUDA devices, on a stand-in that does everything at once."""

from contextlib import contextmanager
from functools import partial

import pytest

from gguf_pp.backend import cuda, cuda_edges
from gguf_pp.config import Options, resolve
from gguf_pp.triton import ops as device_ops
from gguf_pp.worker.server import Worker, WorkerConfig
from tests.cuda_now import Now
from tests.watchdog import watchdog

PROMPTS = ["The", "A longer prompt, of several words", "x" * 100]
GREEDY = {"max_tokens": 12, "temperature": 0.0}
OPTIONS = {"kernels": "torch", "ctx_size": 256, "ubatch_size": 16, "exact": True}


@pytest.fixture
def now(monkeypatch):
    """The stand-in for torch, whose devices are there for whoever asks."""
    now, real = Now(), device_ops.DeviceOps

    class NowOps(real):
        def __init__(self, device, *, exact, is_torch_only):
            now.log.append(f"ops on {device}")
            super().__init__("cpu", exact=exact, is_torch_only=True)

    monkeypatch.setattr(cuda_edges, "TEST_BYTES", (256,))
    monkeypatch.setattr(cuda, "CudaSet", partial(cuda.CudaSet, api=now))
    monkeypatch.setattr(cuda, "open_cuda", partial(cuda.open_cuda, api=now))
    monkeypatch.setattr(device_ops, "DeviceOps", NowOps)
    with watchdog(120):
        yield now


@contextmanager
def lending(*devices, memory=None):
    """Workers that lend one list of devices each: `cuda:0,cpu`."""
    workers = []
    try:
        for device in devices:
            asked = resolve(Options(device=device, memory=memory))
            config = WorkerConfig(
                host="127.0.0.1",
                port=0,
                devices=asked.devices,
                memory_bytes=asked.memory_bytes,
                cuda_bytes=asked.cuda_bytes,
            )
            workers.append(Worker(config))
            workers[-1].start()
        yield workers
    finally:
        for worker in workers:
            worker.close()


def name_of(worker):
    """For --device."""
    return f"tcp://{worker.address}"


def free_bytes(worker, i=0):
    """As it says."""
    return worker.lender.describe()[i]["free_bytes"]


def everything(llm):
    """Tokens of three at once, and logits."""
    tokens = [c.ids for c in llm.generate_batch(PROMPTS, **GREEDY)]
    return tokens, llm.logits(llm.tokenize(PROMPTS[1]))


def answer(llm):
    """Of one."""
    return llm.generate(PROMPTS[0], **GREEDY).completion().ids
