"""Ctrl-C that waits for the end of a block, so that what is kept is whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupted() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets within the block; the second is handled as ever."""
    asked, before = threading.Event(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield asked  # signals go to the main thread alone; one that is ignored, or handled in C, is left to it
        return

    def hold(number: int, frame: Any) -> None:
        if asked.is_set():
            before(number, frame)
        asked.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
