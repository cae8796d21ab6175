"""Real workers, as processes of their own."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

PATIENCE_S = 60
"""What a start or an end may take before a test fails instead of hanging."""


class WorkerProcess:
    """`gguf-pp worker` on a port of its own choice; `address` is host:port.

    Lines of its log, which is its stderr, are in `log`. `cores` are those it may use.
    """

    def __init__(
        self,
        *flags: str,
        host: str = "127.0.0.1",
        port: int = 0,
        cores: set[int] | None = None,
    ) -> None:
        command = [sys.executable, "-P", "-m", "gguf_pp", "worker", "-H", host, "-p", str(port)]
        self.process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )
        self.log: list[str] = []
        self.output: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    @cached_property
    def address(self) -> str:
        """Wait until it listens; RuntimeError with its log if it never does."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip())
            if found := re.match(r"listening on (\S+),", line):
                return found[1]
        self._reader.join()
        raise RuntimeError("\n".join(self.log))

    @property
    def device(self) -> str:
        """Its name for --device."""
        return f"tcp://{self.address}"

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.rpartition(":")[2])

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.log.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until `times` lines of the log have `text` in them."""

        def said() -> bool:
            return sum(text in line for line in self.log) >= times

        with self._changed:
            assert self._changed.wait_for(said, PATIENCE_S), (text, self.log)

    def end(self) -> int:
        """Ask it to end, as a service manager does, and return its exit code."""
        self.process.terminate()
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        return code

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


@contextmanager
def workers(n: int, folder: Path, *flags: str) -> Iterator[list[WorkerProcess]]:
    """`n` workers with one device and a cache each; ended at the end, and killed if they hang."""
    made: list[WorkerProcess] = []
    try:
        for i in range(n):
            made.append(WorkerProcess("--device", "cpu", "--cache", str(folder / f"{i}"), *flags))
        for worker in made:
            assert worker.address
        yield made
    finally:
        for worker in made:
            worker.kill()
