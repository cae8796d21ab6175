"""What launching costs the host: a decode step and a part of a prompt, kernel by kernel.

    python -m tests.perf.launching [MODEL] [--repetitions 100]

Needs Triton, but no GPU: the driver computes nothing (tests/driver_stub.py), so that all the time
is the host's. Prints microseconds per launch, remembered and as Triton launches by itself (the
least of all repetitions, A B A B), and their ratio. Leave the machine alone meanwhile.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_pp import fetch
from gguf_pp.triton.launching import Launch
from tests.driver_stub import Stub, install
from tests.triton_driver import decode, prompt, stepper

REMEMBERED = Launch.__call__


def as_triton(self: Launch, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    kernel[grid](*arguments, **self.constants, **self.options)


def least_seconds(stub: Stub, call: Callable[[], object], repetitions: int) -> dict[str, float]:
    """Of each way, in turns."""
    least = {"remembered": float("inf"), "as Triton": float("inf")}
    for _ in range(repetitions):
        for name, way in (("remembered", REMEMBERED), ("as Triton", as_triton)):
            Launch.__call__ = way  # type: ignore[method-assign]
            stub.forget()
            start = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--arch", type=int, default=80)
    args = parser.parse_args()
    logging.getLogger("gguf_pp").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        stub = install(Path(folder), args.arch)
        step = stepper(Path(fetch.resolve(args.model)), 1 << 10, exact=False)
        for title, ubatch in (("decode", decode(100, 1)), ("prompt", prompt(0, 0, 64))):
            for _ in range(2):
                step(ubatch)
            stub.forget()
            step(ubatch)
            n = len(stub.launched())
            least = least_seconds(stub, lambda ubatch=ubatch: step(ubatch), args.repetitions)
            ours, theirs = (1e6 * least[name] / n for name in ("remembered", "as Triton"))
            print(
                f"{args.model}, {title} of {ubatch.n_rows} rows: {n} launches of {ours:.1f} us, "
                f"by Triton itself {theirs:.1f} us, ratio {theirs / ours:.2f}"
            )


if __name__ == "__main__":
    main()
