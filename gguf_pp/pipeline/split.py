"""Cut a model into stages. Arithmetic only: no torch, no devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from gguf_pp.errors import ConfigError, PlacementError


@dataclass(frozen=True, slots=True)
class Part:
    """What one stage holds of a model: layers, and perhaps its ends.

    `embeds` is the embedding of tokens, `heads` the last norm and the output head. `has_table`: the
    device has the embedding in another stage already, and a tied head is the same matrix.
    """

    layers: range
    embeds: bool
    heads: bool
    has_table: bool = False


def parts_of(layers: Sequence[range], local: Sequence[bool]) -> list[tuple[int, Part]]:
    """Stages in order: the index of a device and its part of the model.

    The embedding goes with the first layers and the head with the last. If those are on another
    machine (not `local`), an end is a stage of its own, without layers, on the first or the last
    local device: hidden states cross the network then, and not logits.
    """
    n_layers = layers[-1].stop
    i_embeds, i_heads = ends_of(local)
    away_first, away_last = i_embeds != 0, i_heads != len(layers) - 1
    stages = [
        (
            i,
            Part(
                mine,
                embeds=mine.start == 0 and not away_first,
                heads=mine.stop == n_layers and not away_last,
            ),
        )
        for i, mine in enumerate(layers)
    ]
    if away_first:
        stages.insert(0, (i_embeds, Part(range(0), embeds=True, heads=False)))
    if away_last:
        stages.append((i_heads, Part(range(n_layers, n_layers), embeds=False, heads=True)))
    last = stages[-1][1]
    if i_embeds == i_heads and not last.embeds:
        stages[-1] = i_heads, replace(last, has_table=True)
    return stages


def ends_of(local: Sequence[bool]) -> tuple[int, int]:
    """Which devices have the embedding and the head: the first and the last one of this machine,
    or of all if none is."""
    here = [i for i, is_here in enumerate(local) if is_here] or range(len(local))
    return here[0], here[-1]


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
    """`-ts 3,1`: layers in proportion to positive `shares`. Raises PlacementError if a device would
    get none."""
    return _none_empty(ranges_of(share_out(n_layers, shares)))


def share_out(n_layers: int, shares: Sequence[float]) -> list[int]:
    """Numbers of layers in proportion to positive `shares`, rounded by largest remainder."""
    quotas = [n_layers * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: n_layers - sum(counts)]:
        counts[i] += 1
    return counts


def split_evenly(
    layer_costs: Sequence[int],
    capacities: Sequence[float],
    extra_costs: Sequence[float] = (),
) -> list[range]:
    """The contiguous split whose most burdened device is least so, relative to its capacity.

    Costs are bytes and capacities free bytes to balance memory; bytes of layers and relative
    speeds to balance time. `extra_costs` are what devices carry beside layers (the embedding; norm
    and head). Among equals earlier stages get fewer layers.
    """
    n_layers, n_stages = len(layer_costs), len(capacities)
    if n_stages > n_layers:
        raise PlacementError(
            f"{n_layers} layers cannot be split over {n_stages} devices",
            hint="name fewer devices: a stage needs at least one layer",
        )
    sums = list(accumulate(layer_costs, initial=0))
    extra = [*extra_costs] or [0.0] * n_stages

    def load(i_stage: int, start: int, stop: int) -> float:
        return (sums[stop] - sums[start] + extra[i_stage]) / max(1e-9, capacities[i_stage])

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
