import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_pp.config import (
    Device,
    Options,
    parse_bytes,
    parse_counts,
    parse_devices,
    parse_shares,
    resolve,
)
from gguf_pp.errors import ConfigError

TWO = "cpu:0,cpu:1"


def names(config):
    return [device.name for device in config.devices]


def test_without_flags_one_device_has_all_cores_and_nothing_is_pipelined():
    config = resolve(Options())
    assert config.devices == (Device("cpu", "cpu", None),)
    assert (config.shares, config.layers, config.ctx_size, config.ubatch_size) == (None,) * 4
    assert (config.n_copies, config.n_slots, config.batch_size) == (1, 1, 2048)
    assert config.kv_types == ("f16", "f16")
    assert (config.kernels, config.exact, config.memory_bytes) == ("auto", False, None)
    assert config.notes == ()
    assert config.max_ubatch_size == 512


def test_what_was_resolved_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve(Options()).n_copies = 3


def test_devices_keep_the_order_in_which_they_were_named():
    assert parse_devices("cpu:3, cpu:0") == (Device("cpu:3", "cpu", 3), Device("cpu:0", "cpu", 0))


def test_a_cuda_device_may_be_named_again_as_another_virtual_one():
    found = [(d.name, d.kind, d.index) for d in parse_devices("cuda,cuda:1,cuda:0,cpu,cuda:0")]
    assert found == [
        ("cuda:0", "cuda", 0),
        ("cuda:1", "cuda", 1),
        ("cuda:0#2", "cuda", 0),
        ("cpu", "cpu", None),
        ("cuda:0#3", "cuda", 0),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cuda:x", "no device 'cuda:x'"),
        ("cpu:-1", "no device 'cpu:-1'"),
        ("cpu:0,", "no device ''"),
        ("CPU", "no device 'CPU'"),
        ("cpu:0,cpu:1,cpu:0", "'cpu:0' is named twice"),
        ("cpu:0,cpu:00", "'cpu:0' is named twice"),
        ("cpu,cpu:1", "cpu is all cores"),
    ],
)
def test_a_device_that_cannot_be_is_named(text, says):
    with pytest.raises(ConfigError, match=says):
        resolve(Options(device=text))


def test_an_empty_list_of_devices_is_not_the_default():
    with pytest.raises(ConfigError, match="no device ''"):
        resolve(Options(device=""))


@pytest.mark.parametrize("text", ["3,1", "3/1", " 3 , 1 ", "3.0,1e0"])
def test_shares_are_written_with_commas_or_slashes(text):
    assert parse_shares(text) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a list of numbers"),
        ("3,", "not a list of numbers"),
        ("3;1", "not a list of numbers"),
        ("3,nan", "finite and not negative"),
        ("inf,1", "finite and not negative"),
        ("-1,2", "finite and not negative"),
        ("1e308,1e308", "finite and not negative"),
        ("1e307,1", "finite and not negative"),
        ("0,0", "leaves no device"),
        ("0,-0.0", "leaves no device"),
    ],
)
def test_shares_without_a_meaning_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_shares(text)


def test_a_device_with_share_0_is_not_opened():
    config = resolve(Options(device="cpu:0,cpu:1,cpu:2", tensor_split="2,0,1"))
    assert names(config) == ["cpu:0", "cpu:2"]
    assert config.shares == (2.0, 1.0)
    assert config.n_copies == 2


def test_one_device_left_by_shares_is_not_pipelined():
    config = resolve(Options(device=TWO, tensor_split="0,1", n_copies=4))
    assert names(config) == ["cpu:1"]
    assert config.n_copies == 1
    assert config.notes == ("--n-copies 4 has no effect: there is one device",)


def test_threads_count_for_the_devices_as_named_not_as_left():
    config = resolve(Options(device="cpu:0,cpu:1,cpu:2", tensor_split="2,0,1", threads="1,2,3"))
    assert [(d.name, d.threads) for d in config.devices] == [("cpu:0", 1), ("cpu:2", 3)]
    config = resolve(Options(device=TWO, split_mode="none", main_gpu=1, threads="1,2"))
    assert config.devices == (Device("cpu:1", "cpu", 1, 2),)


@pytest.mark.parametrize(("device", "text"), [(TWO, "1"), (TWO, "1,2,3"), ("cpu", "1,1")])
def test_the_number_of_shares_is_the_number_of_devices(device, text):
    n_shares, n_devices = len(text.split(",")), len(device.split(","))
    with pytest.raises(ConfigError, match=f"-ts has {n_shares} shares for {n_devices} devices"):
        resolve(Options(device=device, tensor_split=text))


def test_shares_and_layer_counts_contradict_each_other():
    with pytest.raises(ConfigError, match="-ts and --layers both"):
        resolve(Options(device=TWO, tensor_split="1,1", layers="3,4"))


def test_layer_counts_are_kept_as_given():
    assert resolve(Options(device=TWO, layers="10/12")).layers == (10, 12)


@pytest.mark.parametrize("text", ["", "0,3", "1.5", "-1", "1,,2", "two", "1e3", "9" * 10])
def test_counts_are_positive_whole_numbers(text):
    with pytest.raises(ConfigError, match=r"--layers .* is not a list of positive whole numbers"):
        parse_counts("--layers", text)


def test_without_a_split_the_main_device_alone_is_used():
    config = resolve(Options(device=TWO, split_mode="none", main_gpu=1))
    assert names(config) == ["cpu:1"]
    assert config.notes == ()


@pytest.mark.parametrize("flags", [{"tensor_split": "1,3"}, {"layers": "1,3"}])
def test_a_split_that_is_not_used_is_said(flags):
    config = resolve(Options(device=TWO, split_mode="none", **flags))
    assert (names(config), config.shares, config.layers) == (["cpu:0"], None, None)
    flag = "-ts" if "tensor_split" in flags else "--layers"
    assert config.notes == (f"{flag} has no effect: --split-mode is none",)


@pytest.mark.parametrize("main_gpu", [-1, 2])
def test_the_main_device_is_one_of_them(main_gpu):
    with pytest.raises(ConfigError, match=f"-mg {main_gpu}: there are 2 devices"):
        resolve(Options(device=TWO, split_mode="none", main_gpu=main_gpu))


@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        ("row", "rows of a matrix are not split over devices here; choose one of none, layer"),
        ("tensor", "tensors are not split over devices here; choose one of none, layer"),
        ("x", "choose one of none, layer"),
    ],
)
def test_other_split_modes_are_refused_with_what_there_is(mode, hint):
    with pytest.raises(ConfigError, match=f"--split-mode cannot be '{mode}'") as caught:
        resolve(Options(split_mode=mode))
    assert caught.value.hint == hint


@pytest.mark.parametrize("value", ["99", "-1", "all", "auto", "0"])
def test_gpu_layers_are_accepted_and_said_to_have_no_effect(value):
    (note,) = resolve(Options(n_gpu_layers=value)).notes
    assert note == "-ngl has no effect: there is no GPU among the devices"


@pytest.mark.parametrize(
    ("value", "n"),
    [("99", 99), ("0", 0), ("-1", None), ("all", None), ("auto", "auto"), (None, "auto")],
)
def test_gpu_layers_count_where_all_devices_are_gpus(value, n):
    config = resolve(Options(device="cuda:0", n_gpu_layers=value))
    assert (config.n_gpu_layers, config.notes) == (n, ())
    assert config.n_copies == (1 if n is None else 2)


@pytest.mark.parametrize("others", [{}, {"device": "cuda:0,cpu"}, {"layers": "1"}])
def test_where_gpu_layers_are_not_asked_for_nothing_is_said_of_them(others):
    assert resolve(Options(**{"device": "cpu", **others})).notes == ()


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"device": "cuda:0,cpu"}, "there are others than GPUs among the devices"),
        ({"device": "cuda:0,cuda:1", "layers": "1,2"}, "--layers says what each device has"),
    ],
)
def test_gpu_layers_do_not_contradict_what_is_said_of_devices(others, why):
    config = resolve(Options(n_gpu_layers="3", **others))
    assert (config.n_gpu_layers, config.notes) == (None, (f"-ngl has no effect: {why}",))


def test_memory_is_that_of_the_cpu_and_of_cuda_devices_by_name():
    config = resolve(Options(device="cuda:1,cpu,cuda:1", memory="cuda:1=20MiB,8MiB"))
    assert (config.memory_bytes, config.cuda_bytes) == (8 << 20, ((1, 20 << 20),))


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ("cuda:0=1g", "'cuda:0', which is no CUDA device of this run"),
        ("cpu=1g", "'cpu', which is no CUDA device"),
        ("1g,2g", "two sizes without a name"),
        ("cuda:1=1g,cuda:1=2g", "gives 'cuda:1' twice"),
        ("cuda:1=", "is not a size"),
    ],
)
def test_memory_of_what_is_not_there_is_refused(memory, says):
    with pytest.raises(ConfigError, match=says):
        resolve(Options(device="cpu,cuda:1", memory=memory))


@pytest.mark.parametrize("value", ["", "many", "1.5", "--1"])
def test_gpu_layers_that_are_no_number_are_refused(value):
    with pytest.raises(ConfigError, match="-ngl"):
        resolve(Options(n_gpu_layers=value))


@pytest.mark.parametrize(("asked", "n_copies"), [(None, 2), (1, 1), (2, 2), (16, 16)])
def test_two_devices_get_two_copies_unless_others_are_asked_for(asked, n_copies):
    config = resolve(Options(device=TWO, n_copies=asked))
    assert (config.n_copies, config.notes) == (n_copies, ())


@pytest.mark.parametrize("device", ["cpu", TWO])
@pytest.mark.parametrize("asked", [0, -1, 17])
def test_copies_are_1_to_16(device, asked):
    with pytest.raises(ConfigError, match=f"--n-copies cannot be {asked}$") as caught:
        resolve(Options(device=device, n_copies=asked))
    assert caught.value.hint == "1 to 16, or auto"


def test_one_copy_on_one_device_needs_no_note():
    assert resolve(Options(n_copies=1)).notes == ()


def test_threads_are_one_number_for_all_or_one_each():
    both = resolve(Options(device=TWO, threads="3")).devices
    assert [d.threads for d in both] == [3, 3]
    each = resolve(Options(device=TWO, threads="1,2")).devices
    assert [d.threads for d in each] == [1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,2,3", "3 numbers for 2 devices"),
        ("0", "positive whole numbers"),
        ("1025", "--threads cannot be 1025"),
    ],
)
def test_threads_that_fit_no_device_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        resolve(Options(device=TWO, threads=text))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"ctx_size": -1}, "--ctx-size cannot be -1"),
        ({"ctx_size": (1 << 30) + 1}, "--ctx-size cannot be"),
        ({"batch_size": 0}, "--batch-size cannot be 0"),
        ({"ubatch_size": 0}, "--ubatch-size cannot be 0"),
        ({"ubatch_size": -8}, "--ubatch-size cannot be -8"),
        ({"ubatch_size": 1 << 17, "batch_size": 1 << 18}, "--ubatch-size cannot be"),
        ({"parallel": 0}, "--parallel cannot be 0"),
        ({"ubatch_size": 513, "batch_size": 512}, r"\(513\) exceeds --batch-size \(512\)"),
        ({"cache_type_k": "q8_0"}, "--cache-type-k cannot be 'q8_0'"),
        ({"cache_type_v": "f64"}, "--cache-type-v cannot be 'f64'"),
        ({"run_ahead": -1}, "--run-ahead cannot be -1"),
        ({"run_ahead": 3}, "--run-ahead cannot be 3"),
        ({"kernels": "cuda"}, "--kernels cannot be 'cuda'"),
        ({"edge_copy": "peer"}, "--edge-copy cannot be 'peer'"),
        ({"memory": "lots"}, "--memory 'lots' is not a size"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_flag(flags, says):
    with pytest.raises(ConfigError, match=says):
        resolve(Options(**flags))


@pytest.mark.parametrize(
    ("device", "run_ahead"),
    [
        ("cpu", 0),
        ("cpu:0,cpu:1", 0),
        ("cuda:0", 1),
        ("cpu,cuda:0", 1),
        ("cuda:0,cpu", 0),
        ("cuda:0,tcp://host:1", 1),
        ("cpu,tcp://host:1/cuda:0", 0),
        ("tcp://host:1", 0),
    ],
)
def test_the_host_runs_ahead_where_the_last_device_here_is_a_cuda_device(device, run_ahead):
    assert resolve(Options(device=device)).run_ahead == run_ahead
    assert resolve(Options(device=device, run_ahead=2)).run_ahead == 2


def test_a_context_of_0_is_as_much_as_fits():
    assert resolve(Options(ctx_size=0)).ctx_size is None
    assert resolve(Options(ctx_size=1)).ctx_size == 1


@pytest.mark.parametrize(
    ("flags", "rows"),
    [({}, 512), ({"batch_size": 128}, 128), ({"ubatch_size": 64}, 64), ({"batch_size": 4096}, 512)],
)
def test_buffers_are_made_for_the_largest_ubatch(flags, rows):
    assert resolve(Options(**flags)).max_ubatch_size == rows


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("512M", 512 << 20),
        ("1.5g", 3 << 29),
        ("2 KB", 2048),
        ("1t", 1 << 40),
        ("4096", 4096),
        ("4096b", 4096),
    ],
)
def test_sizes_are_powers_of_1024(text, n_bytes):
    assert parse_bytes("--memory", text) == n_bytes


@pytest.mark.parametrize("text", ["", "g", "-1g", "1e9", "1.g", "1 g i b", "1x", "nan"])
def test_a_size_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="is not a size such as"):
        parse_bytes("--memory", text)


@given(st.text(max_size=12))
def test_no_text_makes_a_parser_fail_in_another_way(text):
    for parse in (
        parse_devices,
        parse_shares,
        lambda t: parse_counts("--layers", t),
        lambda t: parse_bytes("--memory", t),
    ):
        try:
            parse(text)
        except ConfigError as exc:
            assert str(exc)
