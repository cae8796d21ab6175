"""Cut a model into stages. Arithmetic only: no torch, no devices."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from gguf_pp.errors import ConfigError, PlacementError


def ranges_of(counts: Sequence[int]) -> list[range]:
    """Contiguous ranges with these sizes; each edge ends one range and starts the next."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def split_exact(n_layers: int, counts: Sequence[int], n_devices: int) -> list[range]:
    """`--layers 10,12,8`: exact counts per device, in order."""
    if len(counts) != n_devices:
        raise ConfigError(f"--layers has {len(counts)} numbers for {n_devices} devices")
    if sum(counts) != n_layers:
        raise ConfigError(f"--layers adds up to {sum(counts)}, but the model has {n_layers} layers")
    return _none_empty(ranges_of(counts))


def split_by_shares(n_layers: int, shares: Sequence[float]) -> list[range]:
    """`-ts 3,1`: layers in proportion to positive `shares`, rounded by largest remainder."""
    quotas = [n_layers * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: n_layers - sum(counts)]:
        counts[i] += 1
    return _none_empty(ranges_of(counts))


def split_evenly(
    layer_costs: Sequence[int],
    capacities: Sequence[float],
    first_cost: int = 0,
    last_cost: int = 0,
) -> list[range]:
    """The contiguous split whose most burdened device is least so, relative to its capacity.

    Costs are bytes and capacities free bytes to balance memory; bytes of layers and relative
    speeds to balance time. `first_cost` and `last_cost` are what the first and last stage carry
    beside layers (embedding; norm and head). Among equals earlier stages get fewer layers.
    """
    n_layers, n_stages = len(layer_costs), len(capacities)
    if n_stages > n_layers:
        raise PlacementError(
            f"{n_layers} layers cannot be split over {n_stages} devices",
            hint="name fewer devices: a stage needs at least one layer",
        )
    sums = list(accumulate(layer_costs, initial=0))

    def load(i_stage: int, start: int, stop: int) -> float:
        extra = first_cost * (i_stage == 0) + last_cost * (i_stage == n_stages - 1)
        return (sums[stop] - sums[start] + extra) / max(1e-9, capacities[i_stage])

    # best[e] = (fullest of the stages so far, their edges) when they end at layer e
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (load(0, 0, end), (0, end)) for end in range(1, n_layers - n_stages + 2)
    }
    for i_stage in range(1, n_stages):
        ends = range(i_stage + 1, n_layers - n_stages + i_stage + 2)
        best = {
            end: min(
                (max(worst, load(i_stage, start, end)), (*edges, end))
                for start, (worst, edges) in best.items()
                if start < end
            )
            for end in ends
        }
    return [range(start, stop) for start, stop in pairwise(best[n_layers][1])]


def _none_empty(ranges: list[range]) -> list[range]:
    for i_stage, layers in enumerate(ranges):
        if not layers:
            raise PlacementError(
                f"stage {i_stage} of {len(ranges)} would get none of the {ranges[-1].stop} layers",
                hint="raise its share, or give it 0 to leave the device out",
            )
    return ranges
