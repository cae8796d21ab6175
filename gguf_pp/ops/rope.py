"""Rotation tables of rotary position embeddings, with the scalings that GGUF files ask for.

Formulas: Su et al. 2021 (RoFormer); linear scaling divides positions; YaRN (Peng et al. 2023)
blends scaled and unscaled angles by how often a dimension turns within the original context, and
raises the magnitude by 1 + 0.1 ln(factor). `rope_freqs` tensors (Llama 3) divide each frequency.
"""

import math

import torch
from torch import Tensor

from gguf_pp.ops.base import Rope, RopeParams

_BLOCK = 256
"""Positions at a time: what they take in float64 stays in the cache."""


def make_rope(params: RopeParams, n_positions: int, freq_factors: Tensor | None = None) -> Rope:
    """Build the tables for positions [0, n_positions).

    `freq_factors` [n_rot/2] divide the frequencies. Angles are computed in float64: in float32 a
    position of 100,000 would already be off by 0.004 radians.
    """
    pairs = torch.arange(params.n_rot // 2, dtype=torch.float64)
    frequency = params.base ** (-2.0 * pairs / params.n_rot)
    if freq_factors is not None:
        frequency = frequency / freq_factors.to(torch.float64)
    magnitude = params.magnitude
    if params.scaling == "linear":
        frequency = frequency / params.factor
    elif params.scaling == "yarn":
        keep = _yarn_keep(params, pairs)
        frequency = frequency / params.factor * (1 - keep) + frequency * keep
        magnitude *= 1 + 0.1 * math.log(params.factor)
    cos, sin = (torch.empty(n_positions, len(frequency)) for _ in range(2))
    for first in range(0, n_positions, _BLOCK):
        rows = slice(first, first + _BLOCK)
        positions = torch.arange(first, min(first + _BLOCK, n_positions), dtype=torch.float64)
        angles = torch.outer(positions, frequency)
        cos[rows] = angles.cos() * magnitude
        sin[rows] = angles.sin() * magnitude
    return Rope(cos, sin, params.neox)


def _yarn_keep(params: RopeParams, pairs: Tensor) -> Tensor:
    """Share of the unscaled angle per pair: 1 for fast dimensions, 0 for slow, a ramp between."""

    def dimension(n_turns: float) -> float:
        turns = params.n_ctx_original / (n_turns * 2 * math.pi)
        return params.n_rot * math.log(turns) / (2 * math.log(params.base))

    low = max(0.0, math.floor(dimension(params.beta_fast)))
    high = min(params.n_rot - 1.0, math.ceil(dimension(params.beta_slow)))
    return 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)
