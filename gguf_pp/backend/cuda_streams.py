"""Streams of CUDA devices, of which each has one owner at a time.

Torch makes 32 streams of each priority on a device, and deals them out in turn: whoever opens and
closes many models would get one again that a model computes on which is still open. The two would
wait for each other, and a graph that one captures would have in it what the other launches.
"""

import threading
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

Idle = defaultdict[tuple[int, int], list[Any]]

_LOCK = threading.Lock()
_IDLE: WeakKeyDictionary[Any, Idle] = WeakKeyDictionary()
"""Streams that were given back, by device and priority."""


def take(api: Any, index: int, *, compute: bool) -> Any:
    """A stream of device `index` that is nobody's, as long as there are no more than 32 at a time.

    Those that do not compute are of another priority, and go first.
    """
    priority = 0 if compute else -1
    with _LOCK:
        if idle := _of(api)[index, priority]:
            return idle.pop()
        return api.cuda.Stream(device=index, priority=priority)


def give_back(api: Any, index: int, stream: Any, *, compute: bool) -> None:
    """Let others have a stream that has nothing to do."""
    with _LOCK:
        _of(api)[index, 0 if compute else -1].append(stream)


def _of(api: Any) -> Idle:
    return _IDLE.setdefault(api, defaultdict(list))
