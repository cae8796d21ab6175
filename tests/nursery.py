"""Workers and clients that start at once: forked from a process that has imported torch already.

    python -m tests.nursery

reads requests, a line of JSON each: {"argv", "folder"} starts `gguf-pp`, whose output goes to two
files in the folder, and is answered with its pid; {"wait": pid} with its exit code.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_S = 60
ROOT = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1


class Process:
    """One of them."""

    def __init__(self, nursery: "Nursery", folder: Path, argv: Sequence[str]) -> None:
        self._nursery = nursery
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.pid = nursery.ask({"argv": argv, "folder": str(folder)})

    def output(self) -> str:
        """Its stdout so far."""
        return (self.folder / "out").read_text()

    def log(self) -> str:
        """Its stderr so far."""
        return (self.folder / "err").read_text()

    def wait_for(self, pattern: str, name: str = "err") -> re.Match[str]:
        """Wait for something in the log, or in the output ("out")."""
        path, deadline = self.folder / name, time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, path.read_text())):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.005)
        return found

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        code = self._nursery.ask({"wait": self.pid})
        self.pid = 0
        return code

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
            self.wait()


class Worker(Process):
    """`gguf-pp worker`, on a port of its own choice. `address` is host:port."""

    def __init__(self, nursery: "Nursery", folder: Path, flags: Sequence[str]) -> None:
        self._flags = flags
        self._start(nursery, folder, 0)

    def _start(self, nursery: "Nursery", folder: Path, port: int) -> None:
        super().__init__(nursery, folder, ["worker", "-p", str(port), *self._flags])
        self.address = self.wait_for(r"listening on (\S+),", "out")[1]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def device(self) -> str:
        return f"tcp://{self.address}"

    def restart(self) -> None:
        """Be there again after a signal: go on, or start anew on the same port."""
        if self.pid:
            self.send(signal.SIGCONT)
        else:
            self._start(self._nursery, self.folder, self.port)


class Nursery:
    """The process, and all those that it has made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Process] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, request: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def worker(self, *flags: str) -> Worker:
        """A new one, that keeps no weights."""
        folder = self._folder / str(len(self._made))
        flags = ("--cache", str(folder / "cache"), "--cache-size", "0", *flags)
        worker = Worker(self, folder, flags)
        self._made.append(worker)
        return worker

    def run(self, *argv: str) -> Process:
        """`gguf-pp` with these arguments."""
        process = Process(self, self._folder / str(len(self._made)), argv)
        self._made.append(process)
        return process

    def close(self) -> None:
        for process in self._made:
            process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    """A nursery, closed afterwards with all that came of it."""
    made = Nursery(folder)
    try:
        yield made
    finally:
        made.close()


def _start(argv: list[str], folder: Path) -> int:
    for name in ("out", "err"):
        (folder / name).write_bytes(b"")
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["gguf-pp", *argv]
    code = 1
    try:
        code = main(argv)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import gguf_pp.engine
    import gguf_pp.worker.server  # noqa: F401 - imported once, for all
    from gguf_pp.cli.main import main
    from gguf_pp.models import llama  # noqa: F401
    from gguf_pp.ops import native  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = os.waitpid(request["wait"], 0)[1]
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            print(_start(request["argv"], Path(request["folder"])), flush=True)
