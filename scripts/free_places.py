"""Run jobs over a pool of places (copies of the project, or GPUs), one job per place at a time."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R")


def share(places: Sequence[P], jobs: Iterable[T], work: Callable[[P, T], R]) -> list[R]:
    """Run `work(place, job)` for every job, one job at a time per place, and return the results in job order."""
    free: queue.SimpleQueue[P] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def one(job: T) -> R:
        place = free.get()
        try:
            return work(place, job)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, jobs))
