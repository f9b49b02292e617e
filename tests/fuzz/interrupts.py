"""Loads that a signal interrupts at a random moment, and what has to hold after each.

python -m tests.fuzz.interrupts --loads 10000 --result results.json
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_backends.adapters import read_checkpoint

from .running import keep
from .simulation.adapters import SPECS, faults, make_pool, save_adapter


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt inside the block when the time is over, as Ctrl-C would."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)


def interrupt_loads(root: Path, loads: int, seed: int = 0) -> tuple[int, list[str]]:
    """Load random adapters, each interrupted after a random time; the pool is used throughout.

    Returns:
        How many loads were interrupted, and what was wrong.
    """
    draw = random.Random(seed)
    names = [f"adapter{i}" for i in range(12)]
    folders = {name: save_adapter(root, name, patterns=True) for name in names}
    adapters = {name: read_checkpoint(folder, SPECS) for name, folder in folders.items()}
    pool, interrupted, wrong = make_pool(), 0, []
    start = time.perf_counter()
    for name, folder in folders.items():
        pool.load(name, folder)
    longest = 1.3 * (time.perf_counter() - start) / len(folders)
    for load in range(loads):
        name, seconds = draw.choice(sorted(folders)), draw.uniform(1e-5, longest)
        try:
            with interrupt_after(seconds):
                if name in pool.slots and draw.random() < 0.3:
                    pool.unload(name)
                else:
                    pool.load(name, folders[name], replace_existing=True)
        except KeyboardInterrupt:
            interrupted += 1
        except Exception as error:
            wrong.append(f"load {load}: {type(error).__name__}: {error}")
        wrong += [f"load {load}: {fault}" for fault in faults(pool, adapters)]
    return interrupted, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        interrupted, wrong = interrupt_loads(Path(root), given.loads, given.seed)
    if given.result is not None:
        outcomes = {"interrupted": interrupted, "finished": given.loads - interrupted}
        keep(
            given.result,
            "interrupts",
            {"seed": given.seed, "done": given.loads, "outcomes": outcomes, "faults": wrong},
        )
    print(
        f"{given.loads} loads, {interrupted} interrupted, {len(wrong)} faults",
        *wrong[:20],
        sep="\n",
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
