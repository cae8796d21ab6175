"""How many groups of sequences decode at once, and how large ubatches are. Arithmetic only."""

import math
from collections.abc import Iterable, Sequence


def auto_ubatch_size(n_tokens: int, n_stages: int, overhead_rows: int, limit: int) -> int:
    """The ubatch size that minimizes the time of a prompt of `n_tokens` over `n_stages`: a power of
    two from 8 on, or the limit.

    With S rows a ubatch costs c + S (in rows; c is `overhead_rows`), and the pipeline takes
    (n/S + P - 1)(c + S): least at S = sqrt(n c / (P - 1)), and little more around it. So prompts of
    other lengths have ubatches of few sizes, for which devices can keep what they made. One stage
    has no bubble: the limit.
    """
    if n_stages < 2:
        return limit

    def cost(size: int) -> float:
        return (n_tokens / size + n_stages - 1) * (overhead_rows + size)

    best = math.sqrt(n_tokens * overhead_rows / (n_stages - 1))
    below = 1 << max(3, math.floor(math.log2(max(best, 1))))
    return min(limit, min(below, 2 * below, key=cost))


def choose_groups(n_sequences: int, n_stages: int, a: float, b: float, host_s: float) -> int:
    """The number of decode groups G with the highest throughput.

    A group of r = n/G rows takes a + b r seconds per stage. Devices are busy for G (a + b r) per
    round; a group is through after P (a + b r) plus the host's turn. The longer of the two is
    the round. G = P keeps all devices busy; one more hides the host's turn if it costs more than
    reading the weights once more (a).
    """

    def round_s(n_groups: int) -> float:
        stage_s = a + b * n_sequences / n_groups
        return max(n_groups * stage_s, n_stages * stage_s + host_s)

    most = min(n_sequences, 2 * n_stages)
    return min(range(1, most + 1), key=lambda g: (round_s(g), g), default=1)


def fit_stage_time(samples: Iterable[tuple[int, float]]) -> tuple[float, float] | None:
    """Least squares of seconds = a + b rows, both not negative.

    None without two different numbers of rows: nothing tells a from b then, and to call all of it
    a would make one group look as good as any.
    """
    points: Sequence[tuple[int, float]] = list(samples)
    if len({x for x, _ in points}) < 2:
        return None
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    b = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    a = mean_y - b * mean_x
    if a < 0:  # the best line through the origin
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return a, b
