"""How much memory a call takes."""

import tracemalloc


def peak_bytes(call, *args) -> int:
    """The most that Python objects took at any time of the call."""
    tracemalloc.start()
    try:
        call(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
