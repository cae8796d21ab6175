"""What a step reads that changes from step to step, at addresses that do not change.

A CUDA graph reads the memory that it was captured with. So the rows of a step are brought into one
block of memory per number of rows, from where all kernels of the graph read them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gguf_pp.batch import Span, UBatch
from gguf_pp.triton.choose import N_PARAMS, pack


def places(ubatch: UBatch) -> NDArray[np.int32]:
    """Slots and positions of all rows: [2, T]."""
    counts = [span.n_rows for span in ubatch.spans]
    slots = np.repeat(np.array([span.slot for span in ubatch.spans], dtype=np.int32), counts)
    positions = [np.arange(s.start, s.start + s.n_rows, dtype=np.int32) for s in ubatch.spans]
    return np.stack((slots, np.concatenate(positions)))


class StandingRows:
    """Up to `n_rows` rows of one token each, of any slots; or, with `of_prompt`, as many of one.

    `ids` int64, `slots` and `positions` int32 [n_rows], on the device, and `choices` float64
    [n_rows, N_PARAMS], or [0, N_PARAMS] for those of a prompt, which choose nothing. Rows beyond
    those of the ubatch are padding: they stand at position -1, which reads and writes no cell, and
    have token 0. `template` is the ubatch that stands for all of them.
    """

    def __init__(self, n_rows: int, device: torch.device, *, of_prompt: bool = False) -> None:
        self.n_rows = n_rows
        spans = (Span(0, 0, n_rows),) if of_prompt else (Span(0, 0, 1),) * n_rows
        self.n_choices = 0 if of_prompt else n_rows
        self.template = UBatch((0,) * n_rows, spans, outputs=tuple(range(self.n_choices)))
        sizes = [8 * N_PARAMS * self.n_choices, 8 * n_rows, 4 * n_rows, 4 * n_rows]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        choices, ids, slots, positions = torch.split(self.memory, sizes)
        self.choices = choices.view(torch.float64).view(self.n_choices, N_PARAMS)
        self.ids = ids.view(torch.int64)
        self.slots, self.positions = slots.view(torch.int32), positions.view(torch.int32)

    def packed(self, ubatch: UBatch) -> Tensor:
        """What `memory` is to hold for `ubatch`: uint8 on the host."""
        n_padding = self.n_rows - ubatch.n_rows
        slots, positions = places(ubatch)
        columns = (
            pack(ubatch.choices, self.n_choices).numpy(),
            np.array((*ubatch.tokens, *[0] * n_padding), dtype=np.int64),
            np.concatenate((slots, np.zeros(n_padding, dtype=np.int32))),
            np.concatenate((positions, np.full(n_padding, -1, dtype=np.int32))),
        )
        return torch.from_numpy(np.concatenate([c.reshape(-1).view(np.uint8) for c in columns]))
