"""Jobs on several places, copies of the project or GPUs, of which each takes one at a time."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R")


def on_a_free_one(places: Sequence[P], work: Callable[[P, T], R]) -> Callable[[T], R]:
    """Does `work` of a job on a place that no other thread has, and waits for one."""
    free: queue.SimpleQueue[P] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def one(job: T) -> R:
        place = free.get()
        try:
            return work(place, job)
        finally:
            free.put(place)

    return one
