"""Stages on other machines against the same model here: real workers, processes of their own."""

import threading

import numpy as np
import pytest

import gguf_pp
from gguf_pp.errors import ConfigError
from tests.real import real
from tests.tiny import NAMES, golden, write_tiny
from tests.workers import workers

PROMPTS = ["Once upon a time", "Hello", "1, 2, 3, 4,", "The sun"]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with workers(3, tmp_path_factory.mktemp("workers")) as started:
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A worker with two devices, and one that has to be relayed to."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        workers(1, folder / "two", "--device", "cpu:0,cpu:1") as two,
        workers(1, folder / "alone", "--no-forward") as alone,
    ):
        yield two[0], alone[0]


def layouts(started):
    """--device by what it stands for."""
    a, b, c = (worker.device for worker in started)
    return {
        "client and one worker": ["cpu", a],
        "client between workers": [a, "cpu", b],
        "two workers": [a, b],
        "client and three workers": ["cpu", a, b, c],
        "a worker twice": [a, "cpu", f"{a}/cpu"],
    }


LAYOUTS = list(layouts([type("", (), {"device": ""})] * 3))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_architecture_are_the_same_bits_with_one_and_three_workers(
    name, three, tmp_path
):
    path = write_tiny(name, tmp_path / f"{name}.gguf")
    tokens = [int(token) for token in golden(name)[0]]

    def logits(devices, **options):
        with gguf_pp.load(path, devices, ctx_size=64, ubatch_size=7, **options) as llm:
            return llm.logits(tokens)

    here = logits(["cpu"])
    n_layers = gguf_pp.load(path).devices()[0].layers[1]
    assert np.array_equal(here, logits(["cpu", three[0].device]))
    if n_layers > 3:
        assert np.array_equal(here, logits(["cpu", *(worker.device for worker in three)]))


def everything(llm):
    """Text, ids and log-probabilities of one, of four at once, and of a long prompt."""
    one = llm.generate(PROMPTS[0], max_tokens=12, temperature=0).completion()
    four = llm.generate_batch(PROMPTS, max_tokens=10, seed=7)
    likely, ids, values = llm.log_probabilities(llm.tokenize(PROMPTS[0] * 20), n_top=3)
    texts = [(c.text, c.ids, c.finish_reason) for c in (one, *four)]
    return texts, likely.tolist(), ids.tolist(), values.tolist()


@pytest.fixture(scope="module")
def here(chat_model):
    with gguf_pp.load(chat_model, ["cpu"], ctx_size=512, parallel=4) as llm:
        return everything(llm)


@pytest.mark.parametrize("n_copies", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_is_the_same_wherever_stages_are(layout, n_copies, three, chat_model, here):
    devices = layouts(three)[layout]
    options = {"ctx_size": 512, "parallel": 4, "ubatch_size": 16, "n_copies": n_copies}
    with gguf_pp.load(chat_model, devices, **options) as llm:
        assert everything(llm) == here


@pytest.mark.parametrize("layout", ["all devices of a worker", "relayed", "relayed, alone first"])
def test_several_devices_of_a_worker_and_relayed_states_change_nothing(
    layout, pair, chat_model, here
):
    two, alone = (worker.device for worker in pair)
    devices = {
        "all devices of a worker": [two],
        "relayed": [alone, two],
        "relayed, alone first": ["cpu", f"{two}/cpu:1", alone],
    }[layout]
    with gguf_pp.load(chat_model, devices, ctx_size=512, parallel=4) as llm:
        assert everything(llm) == here
        assert not llm.not_pipelined_because


def test_a_worker_named_without_a_device_is_all_of_its_devices(pair, chat_model):
    two = pair[0].device
    with gguf_pp.load(chat_model, ["cpu", two], ctx_size=64) as llm:
        assert [use.name for use in llm.devices()] == ["cpu", f"{two}/cpu:0", f"{two}/cpu:1"]
        assert [use.layers for use in llm.devices()] == [(0, 2), (2, 3), (3, 4)]
    with gguf_pp.load(chat_model, ["cpu", two], ctx_size=64, layers="1,3") as llm:
        assert [use.layers for use in llm.devices()] == [(0, 1), (1, 3), (3, 4)]


def test_layers_are_counted_per_name_of_a_device(pair, chat_model):
    with pytest.raises(ConfigError, match="3 numbers for 2 names of devices"):
        gguf_pp.load(chat_model, ["cpu", pair[0].device], ctx_size=64, layers="1,2,1")
    assert not [thread for thread in threading.enumerate() if pair[0].address in thread.name]


def test_a_device_that_is_named_twice_has_two_rows(three, chat_model):
    a = three[0].device
    with gguf_pp.load(chat_model, [a, "cpu", f"{a}/cpu"], ctx_size=64) as llm:
        assert [use.name for use in llm.devices()] == [f"{a}/cpu", "cpu", f"{a}/cpu"]


def test_what_a_worker_does_not_have_is_named(pair, chat_model):
    with pytest.raises(ConfigError, match=r"/cpu:7: the worker has no such device"):
        gguf_pp.load(chat_model, [f"{pair[0].device}/cpu:7"], ctx_size=64)


def test_half_precision_on_the_wire_stays_close(three, chat_model):
    devices, options = ["cpu", three[0].device, three[1].device], {"ctx_size": 64}
    tokens = list(range(40, 90))
    with gguf_pp.load(chat_model, ["cpu"], **options) as llm:
        exact = llm.logits(tokens)
    with gguf_pp.load(chat_model, devices, wire="f16", **options) as llm:
        rounded = llm.logits(tokens)
    assert not np.array_equal(exact, rounded)
    assert np.linalg.norm(exact - rounded) / np.linalg.norm(exact) < 2e-2


REAL = [
    pytest.param(
        n_workers, n_copies, marks=() if (n_workers, n_copies) == (2, 2) else pytest.mark.slow
    )
    for n_workers in (1, 2, 3)
    for n_copies in (1, 2, 4)
]


@pytest.mark.parametrize(("n_workers", "n_copies"), REAL)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models_generate_the_same_with_a_client_and_workers(name, n_workers, n_copies, three):
    path = real(name)
    options = {"ctx_size": 256, "parallel": 16}
    prompts = [f"{text} {i}" for i in range(4) for text in PROMPTS]

    def run(devices, **more):
        with gguf_pp.load(path, devices, **options, **more) as llm:
            ids = [c.ids for c in llm.generate_batch(prompts, max_tokens=6, temperature=0)]
            return ids, llm.log_probabilities(llm.tokenize(PROMPTS[0] * 8))[0].tolist()

    devices = ["cpu", *(worker.device for worker in three[:n_workers])]
    assert run(devices, n_copies=n_copies) == run(["cpu"])
