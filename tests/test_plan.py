import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.pipeline.plan import Step, bubble, format_plan, plan_steps

COUNTS = st.integers(1, 6)


def test_the_host_walks_one_ubatch_down_before_the_next():
    assert list(plan_steps(2, 3, 2)) == [
        Step(0, 0, 0),
        Step(1, 0, 0),
        Step(0, 1, 1),
        Step(1, 1, 1),
        Step(0, 2, 0),
        Step(1, 2, 0),
    ]


@given(COUNTS, st.integers(0, 12), COUNTS, st.integers(0, 50))
def test_every_stage_runs_every_ubatch_once_and_in_order(n_stages, n_ubatches, n_copies, first):
    steps = list(plan_steps(n_stages, n_ubatches, n_copies, first))
    for i_stage in range(n_stages):
        mine = [s.i_ubatch for s in steps if s.i_stage == i_stage]
        assert mine == list(range(first, first + n_ubatches))
    assert all(s.i_copy == s.i_ubatch % n_copies for s in steps)


@given(COUNTS, st.integers(0, 9), st.integers(0, 9), COUNTS)
def test_a_second_batch_goes_on_where_the_first_ended(n_stages, n_first, n_second, n_copies):
    whole = list(plan_steps(n_stages, n_first + n_second, n_copies))
    parts = plan_steps(n_stages, n_first, n_copies)
    assert [*parts, *plan_steps(n_stages, n_second, n_copies, first=n_first)] == whole


def test_a_plan_is_drawn_as_a_table():
    assert format_plan(list(plan_steps(3, 4, 2))) == (
        "tick  stage 0    stage 1    stage 2\n"
        "   0  u0·c0      ·          ·\n"
        "   1  u1·c1      u0·c0      ·\n"
        "   2  u2·c0      u1·c1      u0·c0\n"
        "   3  u3·c1      u2·c0      u1·c1\n"
        "   4  ·          u3·c1      u2·c0\n"
        "   5  ·          ·          u3·c1"
    )


def test_columns_stay_in_line_with_two_digits():
    lines = format_plan(list(plan_steps(12, 12, 16))).splitlines()
    assert lines[0].index("stage 11") == lines[-1].index("u11·c11")
    assert len(lines) == 1 + 23


@pytest.mark.parametrize(
    ("n_stages", "n_ubatches", "share"), [(1, 5, 0.0), (2, 1, 0.5), (4, 13, 3 / 16), (3, 6, 0.25)]
)
def test_a_bubble_is_the_idle_share_of_the_drawn_table(n_stages, n_ubatches, share):
    assert bubble(n_stages, n_ubatches) == share
    rows = format_plan(list(plan_steps(n_stages, n_ubatches, 2))).splitlines()[1:]
    cells = [cell for row in rows for cell in row.split()[1:]]
    assert cells.count("·") / len(cells) == share
