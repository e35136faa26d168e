"""A function over a stream, in several processes, results in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items in work or waiting for each process: enough that none idles while an earlier item is slow.
WINDOW_PER_WORKER = 4


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield `function(item)` for every item; with one worker in this process.

    Takes items only as results are used, so memory stays bounded. A worker that dies ends the map with an error.
    """
    if workers == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, initializer=exit_with_parent)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= WINDOW_PER_WORKER * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError("a worker process died: killed, or out of memory (try fewer --workers)") from error
    finally:
        pool.shutdown(cancel_futures=True)


def exit_with_parent() -> None:
    """Let this process end when the one that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
