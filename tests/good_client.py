"""A client that generates all the time, and notices when an answer is not the right one."""

import threading

import gguf_pp
from tests.sockets import WAIT_S, eventually

PROMPT = "Once upon a time"


class GoodClient:
    """Runs on a thread from construction to `close`, on this machine and one worker."""

    def __init__(self, model, worker, timeout=15.0):
        with gguf_pp.load(model, ["cpu"], ctx_size=256) as llm:
            self.expected = self._answer(llm)
        self._llm = gguf_pp.load(model, ["cpu", worker.device], ctx_size=256, timeout=timeout)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.n_answers = 0
        self.failure = None
        self._thread.start()

    @staticmethod
    def _answer(llm):
        return llm.generate(PROMPT, max_tokens=16, temperature=0).completion().text

    def _run(self):
        try:
            while not self._stop.is_set():
                assert self._answer(self._llm) == self.expected
                self.n_answers += 1
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            self.failure = exc

    def check(self):
        """Nothing went wrong, and it gets the right answer once more."""
        n = self.n_answers
        eventually(lambda: self.n_answers > n + 1 or self.failure is not None)
        assert self.failure is None

    def close(self):
        self._stop.set()
        self._thread.join(WAIT_S)
        self._llm.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
