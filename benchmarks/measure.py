"""What the benchmarks share: timing in turn, memory, and a table of rows."""

import argparse
import csv
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nd_rotary_encodings import _C, build_info


def seconds(call: Callable[[], object], inner: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) / inner


def in_turn(calls: dict[str, Callable], budget: float, inner: int = 1) -> dict[str, list[float]]:
    """Times of calls that take turns, 5 to 101 each, in about so many seconds."""
    for call in calls.values():
        call()
    round_takes = sum(seconds(call, inner) for call in calls.values())
    times = {name: [] for name in calls}
    for _ in range(min(max(int(budget / round_takes), 5), 101)):
        for name, call in calls.items():
            times[name].append(seconds(call, inner))
    return times


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3


def ratio_to(unit: list[float], times: list[float]) -> dict[str, float]:
    """Median and quartiles in units, whose times were taken in turn."""
    low, middle, high = (quartile / statistics.median(unit) for quartile in statistics.quantiles(times, n=4))
    return {"ratio": middle, "low": low, "high": high}


def peak_bytes(call: Callable[[], object]) -> int:
    """How far the memory that PyTorch's CPU allocator has handed out rises during a call."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(itertools.accumulate(sizes, initial=0))


def parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats and small sizes: does it run?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--instruction-set", help="one of those that `python -m nd_rotary_encodings` lists")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the rows to a CSV file there")
    return parser


def start(options: argparse.Namespace) -> dict[str, object]:
    """Sets up the process as the options say, and returns what each row tells about it."""
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    _C.force_instruction_set(options.instruction_set)
    torch.manual_seed(0)
    about = {
        "commit": commit(),
        "machine": f"{platform.machine()} {platform.system()}",
        "instruction_set": build_info()["instruction_set"],
        "threads": options.threads,
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    return about


def keep_freed_memory() -> None:
    """Starts again with a C library that keeps freed memory, as after the first steps of a training run.

    Else each allocation of a large tensor costs page faults, sometimes of the unit and sometimes of the row.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
    if not settings.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(folder: Path | None, name: str, rows: list[dict[str, object]]) -> None:
    if folder:
        path = folder / f"{name}-{platform.machine()}-{rows[0]['instruction_set']}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        print(f"\nwritten: {path}")
