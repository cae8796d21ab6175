import math

import pytest
import torch

from gguf_pp.ops.base import RopeParams
from gguf_pp.ops.rope import make_rope


def angle(rope, position, pair):
    """The angle in (-pi, pi] and the magnitude of one entry."""
    c, s = float(rope.cos[position, pair]), float(rope.sin[position, pair])
    return math.atan2(s, c), math.hypot(c, s)


def wrapped(radians):
    return math.remainder(radians, 2 * math.pi)


def assert_turns(rope, frequencies, positions, magnitude=1.0):
    for position in positions:
        for pair, frequency in enumerate(frequencies):
            found, length = angle(rope, position, pair)
            off = wrapped(found - position * frequency)
            assert abs(off) < 2e-7 + 1e-7, (position, pair)
            assert length == pytest.approx(magnitude, rel=3e-7)


def test_tables_have_a_row_per_position_and_a_column_per_pair():
    rope = make_rope(RopeParams(n_rot=8, base=100.0, neox=True), 5)
    assert rope.cos.shape == rope.sin.shape == (5, 4)
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert rope.neox
    assert not make_rope(RopeParams(n_rot=8, base=100.0, neox=False), 5).neox


def test_angles_are_position_times_a_falling_frequency():
    rope = make_rope(RopeParams(n_rot=8, base=10000.0, neox=False), 40)
    assert_turns(rope, [1.0, 0.1, 0.01, 0.001], range(40))
    assert rope.cos[0].tolist() == [1.0] * 4
    assert rope.sin[0].tolist() == [0.0] * 4
    # cos 3 and sin 3, written out
    assert float(rope.cos[3, 0]) == pytest.approx(-0.9899924966, abs=1e-7)
    assert float(rope.sin[3, 0]) == pytest.approx(0.1411200081, abs=1e-7)


def test_far_positions_are_as_exact_as_near_ones():
    rope = make_rope(RopeParams(n_rot=4, base=500000.0, neox=False), 131072)
    assert_turns(rope, [1.0, 500000.0**-0.5], [100_000, 131_071])


def test_linear_scaling_divides_positions():
    plain = make_rope(RopeParams(n_rot=8, base=10000.0, neox=True), 10)
    scaled = make_rope(
        RopeParams(n_rot=8, base=10000.0, neox=True, scaling="linear", factor=4.0), 40
    )
    torch.testing.assert_close(scaled.cos[::4], plain.cos, rtol=0, atol=1e-7)
    torch.testing.assert_close(scaled.sin[::4], plain.sin, rtol=0, atol=1e-7)


def test_a_factor_without_a_kind_of_scaling_changes_nothing():
    plain = make_rope(RopeParams(n_rot=8, base=10000.0, neox=True), 10)
    other = make_rope(RopeParams(n_rot=8, base=10000.0, neox=True, factor=8.0), 10)
    assert torch.equal(plain.cos, other.cos)


def test_factors_divide_frequencies():
    rope = make_rope(
        RopeParams(n_rot=6, base=1000.0, neox=False), 20, torch.tensor([1.0, 2.0, 8.0])
    )
    assert_turns(rope, [1.0, 0.1 / 2, 0.01 / 8], range(20))


def test_factors_and_linear_scaling_both_count():
    params = RopeParams(n_rot=4, base=100.0, neox=False, scaling="linear", factor=2.0)
    assert_turns(make_rope(params, 20, torch.tensor([1.0, 5.0])), [0.5, 0.1 / 10], range(20))


def test_the_magnitude_scales_both_tables():
    rope = make_rope(RopeParams(n_rot=4, base=100.0, neox=False, magnitude=1.25), 20)
    assert_turns(rope, [1.0, 0.1], range(20), 1.25)


def yarn(n_rot, base, factor, original, fast=32.0, slow=1.0):
    """Frequencies per pair, after equations 17 to 23 of the YaRN paper as ggml rounds them."""
    found = []

    def pair_of(turns):  # the pair that turns this often within the original context
        return n_rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(pair_of(fast))), min(n_rot - 1, math.ceil(pair_of(slow)))
    for i in range(n_rot // 2):
        frequency = base ** (-2 * i / n_rot)
        if i <= low:
            found.append(frequency)
        elif i >= high:
            found.append(frequency / factor)
        else:
            slowed = (i - low) / (high - low)
            found.append(frequency * (1 - slowed) + frequency / factor * slowed)
    return found, low, high


@pytest.mark.parametrize(
    ("n_rot", "base", "factor", "original"),
    [(64, 10000.0, 4.0, 2048), (128, 1e6, 40.0, 4096), (128, 10000.0, 16.0, 32768)],
)
def test_yarn_slows_only_what_turns_rarely(n_rot, base, factor, original):
    params = RopeParams(
        n_rot, base, neox=True, scaling="yarn", factor=factor, n_ctx_original=original
    )
    frequencies, low, high = yarn(n_rot, base, factor, original)
    assert 0 < low < high < n_rot // 2 + n_rot // 4
    rope = make_rope(params, 3000)
    assert_turns(rope, frequencies, [0, 1, 17, 2999], 1 + 0.1 * math.log(factor))


def test_yarn_ramps_are_where_the_paper_puts_them():
    # Pairs of a head of 64 with base 10000 and 2048 positions: 8.06 turn 32 times, 20.1 once.
    _, low, high = yarn(64, 10000.0, 4.0, 2048)
    assert (low, high) == (8, 21)


def test_yarn_in_which_everything_turns_slowly_scales_all():
    params = RopeParams(8, 10000.0, neox=True, scaling="yarn", factor=2.0, n_ctx_original=8)
    frequencies, _, _ = yarn(8, 10000.0, 2.0, 8)
    assert_turns(make_rope(params, 50), frequencies, [1, 49], 1 + 0.1 * math.log(2))


def test_yarn_with_a_factor_of_1_is_no_scaling():
    params = RopeParams(16, 10000.0, neox=True, scaling="yarn", n_ctx_original=4096)
    plain = make_rope(RopeParams(16, 10000.0, neox=True), 30)
    torch.testing.assert_close(make_rope(params, 30).cos, plain.cos, rtol=0, atol=1e-7)
