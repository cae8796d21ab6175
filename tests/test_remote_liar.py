"""A client whose worker says what none of ours says: an error, and never a crash or a hang."""

import threading

import pytest

import gguf_pp
from gguf_pp.errors import RemoteError
from gguf_pp.net import Connection, Listener
from gguf_pp.wire import Verb, pack_json, pack_range, pack_seconds
from tests.sockets import WAIT_S
from tests.watchdog import watchdog

DEVICE = {
    "name": "cpu",
    "pool": "ram",
    "total_bytes": 1 << 34,
    "free_bytes": 1 << 33,
    "n_threads": 1,
    "relative_speed": 1.0,
    "kernels": "native",
}
ANSWERS = {
    Verb.INFO: {"version": "0.1.0", "wire": [1, 1], "devices": [DEVICE], "forwards": True},
    Verb.OPEN: {
        "missing": [],
        "origin": "cache",
        "weight_bytes": [100],
        "kernels": ["native"],
        "overhead_rows": 1,
    },
    Verb.ALLOCATE: {"kv_bytes": [1], "buffer_bytes": [1], "free_bytes": [1]},
    Verb.LOAD: {},
    Verb.RELEASE: {},
}
N_VOCAB = 262


class Liar:
    """Answers as an honest worker with all layers would, except where `lies` has another answer;
    `result` is what a ubatch is answered with."""

    def __init__(self, lies, result=()):
        self._answers = ANSWERS | lies
        self._result = result
        self._listener = Listener("127.0.0.1", 0, self._serve, timeout_s=5)
        self._listener.start()
        self.device = f"tcp://{self._listener.address}"

    def _serve(self, channel, agreed):
        self._over = threading.Event()
        self._connection = Connection(channel, 5, self, heartbeat_s=agreed.heartbeat_s)
        self._connection.start()
        self._over.wait(WAIT_S)
        self._connection.close()

    def payload_for(self, frame):
        return memoryview(bytearray(frame.n_payload))

    def handle(self, frame):
        if frame.verb is Verb.SUBMIT:
            for verb, meta, payload in self._result:
                self._connection.send(verb, frame.id, meta, payload)
        elif frame.verb is not Verb.TENSOR:
            self._connection.send(Verb.OK, frame.id, pack_json(self._answers[frame.verb]))
            if frame.verb is Verb.LOAD:
                self._connection.send(Verb.CREDIT, 4)

    def lost(self, error):
        self._over.set()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._listener.close()


def ask(model, liar):
    with watchdog(60), gguf_pp.load(model, [liar.device], ctx_size=64, timeout=5.0) as llm:
        return llm.generate("Hello", max_tokens=2).completion()


LIES = [
    {Verb.INFO: {}},
    {Verb.INFO: ANSWERS[Verb.INFO] | {"devices": [DEVICE | {"free_bytes": -1}]}},
    {Verb.INFO: ANSWERS[Verb.INFO] | {"devices": [DEVICE | {"relative_speed": "fast"}]}},
    {Verb.OPEN: {}},
    {Verb.OPEN: ANSWERS[Verb.OPEN] | {"missing": [1 << 40]}},
    {Verb.OPEN: ANSWERS[Verb.OPEN] | {"origin": "nowhere"}},
    {Verb.OPEN: ANSWERS[Verb.OPEN] | {"weight_bytes": []}},
    {Verb.OPEN: ANSWERS[Verb.OPEN] | {"kernels": []}},
    {Verb.ALLOCATE: {}},
    {Verb.ALLOCATE: ANSWERS[Verb.ALLOCATE] | {"kv_bytes": [1, 2]}},
]


@pytest.mark.parametrize("lies", LIES, ids=str)
def test_an_answer_that_makes_no_sense_is_the_workers_fault(lies, chat_model):
    with Liar(lies) as liar, pytest.raises(RemoteError, match=r"127\.0\.0\.1:\d+"):
        ask(chat_model, liar)


ROW = bytes(4 * N_VOCAB)
DONE = (Verb.DONE, pack_seconds([0.0]), None)
LOGITS = (Verb.LOGITS, pack_range(range(1)), ROW)
RESULTS = {
    "the end without logits": [DONE],
    "logits twice": [LOGITS, LOGITS, DONE],
    "logits of another row": [(Verb.LOGITS, pack_range(range(1, 2)), ROW)],
    "logits of another size": [(Verb.LOGITS, pack_range(range(1)), ROW[4:])],
    "hidden states": [(Verb.RESULT, b"", bytes(128))],
    "times of other stages": [LOGITS, (Verb.DONE, pack_seconds([0.0, 0.0]), None)],
    "a failure without a message": [(Verb.FAIL, b"{}", None)],
    "a failure": [(Verb.FAIL, pack_json({"message": "it broke"}), None)],
    "a ubatch": [(Verb.SUBMIT, b"", None)],
    "the end twice": [DONE, DONE],
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_none_fails_the_request(name, chat_model):
    with Liar({}, RESULTS[name]) as liar, pytest.raises(RemoteError, match=r"127\.0\.0\.1:\d+"):
        ask(chat_model, liar)


def test_an_honest_answer_is_taken(chat_model):
    with Liar({}, [LOGITS, DONE]) as liar:
        assert len(ask(chat_model, liar).ids) == 2
