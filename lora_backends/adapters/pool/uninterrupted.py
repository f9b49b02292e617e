"""Work that no signal interrupts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread

import torch


def run_whole(
    work: Callable[[], None], device: torch.device
) -> tuple[BaseException | None, BaseException | None]:
    """Run `work` in a thread of its own, on the current CUDA stream, and wait for its end.

    Returns:
        The error of `work`, and the one that interrupted the waiting; None where there is none.
    """
    failure: list[BaseException] = []
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> None:
        try:
            # Grad mode and stream belong to a thread, so the new one sets them again.
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                work()
        except BaseException as error:
            failure.append(error)

    interrupt: BaseException | None = None
    # signals raise in the main thread alone, so an interrupt waits until the work is done
    thread = Thread(target=run, name="adapter update")
    try:
        thread.start()
    except BaseException as error:
        # A signal came after the start: the thread may be running.
        interrupt = error
    while thread.is_alive():
        # A signal ends `join`, not the work.
        try:
            thread.join()
        except BaseException as error:
            interrupt = error
    return (failure[0] if failure else None), interrupt
