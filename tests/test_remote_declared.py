"""A client that declares odd things: a worker refuses them, or serves them, and goes on."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_pp.errors import RemoteError
from gguf_pp.wire import Verb
from tests.good_client import GoodClient
from tests.light import CTX_SIZE, WAIT_S, Light
from tests.nursery import nursery
from tests.prepared import whole
from tests.watchdog import watchdog

N_VOCAB = 262


@pytest.fixture(autouse=True)
def no_hang():
    with watchdog(180):
        yield


@pytest.fixture(scope="module")
def worker(tmp_path_factory, chat_model):
    """One that serves a good client all the time."""
    with nursery(tmp_path_factory.mktemp("nursery")) as nurse:
        made = nurse.worker("--timeout", "5", "--memory", "256MiB")
        with GoodClient(chat_model, made) as good:
            yield made
            good.check()
        assert "Traceback" not in made.log(), made.log()


@pytest.fixture(scope="module")
def prepared(chat_model):
    return whole(chat_model)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, -1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 1 << 40), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def paths(value, path=()):
    """Every place in a JSON value; of long lists the first and the last."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1} & set(range(len(value)))):
            yield from paths(value[i], (*path, i))


def changed(value, path, new):
    """A copy with something else in one place, or without it (`new` is a deletion)."""
    if not path:
        return new
    copy = value.copy()
    if len(path) == 1 and new is paths:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=150)
@given(data=st.data())
def test_an_open_with_something_odd_in_it_is_refused_or_served(data, worker, prepared):
    body = prepared["open"]
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from([p for p in paths(body) if p]))
        body = changed(body, where, data.draw(st.just(paths) | ODD))
    client = Light(worker.address)
    try:
        request(client, Verb.OPEN, json.dumps(body).encode())
        client.ask(Verb.ALLOCATE, n_copies=2, ubatch_size=16, ctx_size=CTX_SIZE)
        with suppress(KeyError, IndexError, TypeError, ValueError):
            client.send_tensors({**prepared, "open": body}, list(range(39)))
        client.ask(Verb.LOAD, n_ctx=CTX_SIZE)
        client.submit(0, [65], 0)
        client.frames.get(timeout=WAIT_S)
    except RemoteError as exc:
        assert "internal" not in getattr(exc, "kind", ""), exc
    finally:
        client.close()


def request(client, verb, meta):
    """Like `ask` with a body that is not ours to pack."""
    asked = client.connection._requests.open("a test", None)
    client.connection.send(verb, asked.id, meta)
    assert asked.over.wait(WAIT_S)
    client.connection._requests.forget(asked)
    client.connection._check()
    if isinstance(asked.answer, Exception):
        raise asked.answer
    return asked.answer


@pytest.mark.parametrize(
    "meta",
    [
        b"[" * 10_000 + b"]" * 10_000,
        b'{"identity":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        *[b'{"label":' + b"[" * n + b"]" * n + b"}" for n in range(900, 1000, 7)],
        b'{"n_slots":' + b"9" * 100_000 + b"}",
        b'{"label":"\\ud800"}',
        b"\xff\xfe",
        b"",
        b"nul",
        b"{" + b",".join(b'"%d":{}' % i for i in range(60_000)) + b"}",
    ],
    ids=lambda meta: f"{meta[:12]!r} {len(meta)}",
)
def test_json_that_is_a_trap_is_refused(meta, worker):
    client = Light(worker.address)
    with pytest.raises(RemoteError) as caught:
        request(client, Verb.OPEN, meta)
    assert getattr(caught.value, "kind", "protocol") == "protocol"
    client.close()


def test_tensors_and_stages_that_overlap_are_refused(worker, prepared):
    body = prepared["open"]
    tensors = body["tensors"]
    stage = body["stages"][0]
    cases = [
        {"tensors": [*tensors, tensors[0]]},
        {"tensors": tensors[1:]},
        {"tensors": []},
        {"tensors": [[t[0], 999, *t[2:]] for t in tensors]},
        {"tensors": [[t[0], t[1], [1 << 40, 1 << 20], 1 << 62] for t in tensors]},
        {"stages": [stage, stage]},
        {"stages": []},
        {"stages": [{**stage, "layers": [0, 3]}]},
        {"stages": [{**stage, "layers": [3, 0]}]},
        {"stages": [{**stage, "layers": [0, 4, 5]}]},
        {"stages": [{**stage, "layers": [0, 10_000]}]},
        {"stages": [{**stage, "device": "../../etc/passwd"}]},
        {"n_vocab": N_VOCAB + 1},
        {"n_slots": 0},
        {"n_slots": 1 << 40},
        {"kv_types": ["f16"]},
        {"kv_types": ["f16", {}]},
        {"identity": {"sizes": [], "digest": "0" * 64}},
        {"identity": {"sizes": [1 << 40], "digest": "../" * 21 + "x"}},
        {"metadata": {**body["metadata"], "llama.block_count": 1 << 60}},
        {"metadata": {**body["metadata"], "general.architecture": "../llama"}},
        {"metadata": {**body["metadata"], "general.architecture": "__init__"}},
        {"metadata": {**body["metadata"], "llama.attention.head_count": 0}},
        {"metadata": {**body["metadata"], "llama.attention.head_count": -2}},
    ]
    for case in cases:
        client = Light(worker.address)
        with pytest.raises(RemoteError) as caught:
            client.ask(Verb.OPEN, **{**body, **case})
        assert getattr(caught.value, "kind", "protocol") in ("protocol", "model", "memory"), case
        client.close()
