"""What a decode step reads that changes from step to step, at addresses that do not change.

A CUDA graph reads the memory that it was captured with. So the rows of a step are brought into one
block of memory per number of rows, from where all kernels of the graph read them.
"""

import numpy as np
import torch
from torch import Tensor

from gguf_pp.batch import Span, UBatch
from gguf_pp.triton.choose import N_PARAMS, pack


class StandingRows:
    """Up to `n_rows` rows of one token each, of any slots.

    `ids` int64, `slots` and `positions` int32 [n_rows], `choices` float64 [n_rows, N_PARAMS], on
    the device. Rows beyond those of the ubatch are padding: they stand at position -1, which reads
    and writes no cell, and have token 0. `template` is the ubatch that stands for all of them.
    """

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self.n_rows = n_rows
        self.template = UBatch(
            (0,) * n_rows, (Span(0, 0, 1),) * n_rows, outputs=tuple(range(n_rows))
        )
        sizes = [8 * N_PARAMS * n_rows, 8 * n_rows, 4 * n_rows, 4 * n_rows]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        choices, ids, slots, positions = torch.split(self.memory, sizes)
        self.choices = choices.view(torch.float64).view(n_rows, N_PARAMS)
        self.ids = ids.view(torch.int64)
        self.slots, self.positions = slots.view(torch.int32), positions.view(torch.int32)

    def packed(self, ubatch: UBatch) -> Tensor:
        """What `memory` is to hold for `ubatch`: uint8 on the host."""
        n_padding = self.n_rows - ubatch.n_rows
        columns = (
            pack(ubatch.choices, self.n_rows).numpy(),
            np.array((*ubatch.tokens, *[0] * n_padding), dtype=np.int64),
            np.array([*(span.slot for span in ubatch.spans), *[0] * n_padding], dtype=np.int32),
            np.array([*(span.start for span in ubatch.spans), *[-1] * n_padding], dtype=np.int32),
        )
        return torch.from_numpy(np.concatenate([c.reshape(-1).view(np.uint8) for c in columns]))
