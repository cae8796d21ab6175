from tests.simulated import Run


def test_a_trace_keeps_nothing_unless_asked():
    assert Run([[1.0] * 3] * 2, 2).trace.slices == []


def test_a_trace_has_a_slice_for_every_step_transfer_and_submission():
    slices = Run([[1.0] * 3, [2.0] * 3], 2, copy_s=0.5, traced=True).trace.slices
    found = [(s.kind, s.i_stage, s.i_ubatch, s.i_copy, s.n_rows) for s in slices]
    assert found == [
        piece
        for u in range(3)
        for piece in (
            ("host", -1, u, 0, 1 + u),
            ("compute", 0, u, u % 2, 1 + u),
            ("transfer", 0, u, u % 2, 1 + u),
            ("compute", 1, u, u % 2, 1 + u),
        )
    ]


def test_slices_take_the_time_of_their_work():
    slices = Run([[1.0] * 3, [2.0] * 3], 2, copy_s=0.5, traced=True).trace.slices
    seconds = {"compute": {0: 1.0, 1: 2.0}, "transfer": {0: 0.5}, "host": {-1: 0.0}}
    for s in slices:
        assert s.end_s - s.start_s == seconds[s.kind][s.i_stage]


def test_work_begins_when_its_input_is_there_and_its_device_free():
    slices = Run([[1.0] * 4, [0.25] * 4], 2, copy_s=0.5, traced=True).trace.slices
    at = {(s.kind, s.i_stage, s.i_ubatch): s for s in slices}
    for u in range(4):
        arrived = at["transfer", 0, u].end_s
        before = at["compute", 1, u - 1].end_s if u else 0.0
        assert at["compute", 1, u].start_s == max(arrived, before)
