"""A test that hangs fails instead."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread if what is inside takes longer."""

    def bark(number, frame):
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
