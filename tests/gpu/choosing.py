"""Tokens chosen on the device against those that the host's sampler takes, and from a graph."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gguf_pp.batch import Choice
from gguf_pp.sampling import Sampler, SamplingParams
from gguf_pp.triton.choose import kind_of, pack
from gguf_pp.triton.ops import DeviceOps
from tests.gpu.cases import from_graph
from tests.gpu.harness import Report

ENDS = (2, 7)
SIZES = ((5, 1000), (3, 128 << 10))
KINDS = {
    "greedy": Choice(0.0, 0, 1.0, 0.0, 0.0, True),
    "top 40": Choice(0.8, 40, 0.95, 0.05, 0.0, False),
    "all": Choice(1.2, 0, 0.99, 0.0, 0.0, True),
}


def check_choosing(report: Report, device: str) -> None:
    """Every kind, from small and large vocabularies."""
    ops = DeviceOps(device, exact=False)
    ops.set_ends(ENDS)
    random = np.random.Generator(np.random.PCG64(0))
    for (name, choice), (n_rows, n_vocab) in product(KINDS.items(), SIZES):
        values = random.normal(0, 3, (n_rows, n_vocab)).astype(np.float32)
        values[:, 5:9] = values.max() + 1  # ties, of which one is an end
        batch = [choice._replace(number=float(random.random())) for _ in range(n_rows)]
        wanted = [host_token(row, each) for row, each in zip(values, batch, strict=True)]
        logits, params = torch.from_numpy(values).to(device), pack(batch, n_rows).to(device)

        def choose(logits: Tensor = logits, params: Tensor = params, batch=batch) -> Tensor:
            return ops.choose(logits, params, kind_of(batch))

        where = f"{name} of {n_vocab}"
        report.require(choose().tolist() == wanted, f"{where}: not the host's tokens")
        if device != "cpu":
            tokens = from_graph(choose).tolist()
            report.require(tokens == wanted, f"{where}: other tokens from a graph")


def host_token(logits: NDArray[np.float32], choice: Choice) -> int:
    """What Sampler takes from [V] when chance says `choice.number`."""
    params = SamplingParams(
        temperature=choice.temperature, top_k=choice.top_k, top_p=choice.top_p,
        min_p=choice.min_p, ignore_eos=choice.bans_ends, seed=0,
    )  # fmt: skip
    sampler = Sampler(params, ENDS, ())
    sampler._random = SimpleNamespace(random=lambda: choice.number)  # type: ignore[assignment]
    return sampler(logits)
