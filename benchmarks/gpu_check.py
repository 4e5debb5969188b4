"""All that needs a GPU, in one go: build, checks, compute-sanitizer, benchmarks against what else there is.

    python benchmarks/gpu_check.py [--budget SECONDS] [--emulated LIBRARY]

Needs torch with CUDA, a C compiler and nvcc; no network, nothing else installed. Every stage is a process of
its own with a limit of time, and the next begins whatever became of it; the exit status says whether all were
well. Rows go to ``benchmarks/results/<gpu>.csv``. With ``--emulated`` (the library that ``make -C tests/c
cuda`` makes) it exercises itself on the CPU: times then mean nothing and go nowhere.
"""

import argparse
import contextlib
import csv
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

BUDGET = 460  # of eight minutes


# ---- stages, each in a process of its own


def run_stage(name: str, command: list, limit: float, environment: dict) -> bool:
    print(f"\n==== {name} (at most {limit:.0f} s)", flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        code = "out of time"
    print(f"---- {name}: {'well' if code == 0 else code}, {time.monotonic() - start:.1f} s", flush=True)
    return code == 0


def main(budget: float, emulated: str | None) -> int:
    import torch

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ND_ROTARY_WERROR": "1"}
    own = [sys.executable, __file__, *(["--emulated", emulated] if emulated else [])]
    if emulated is None:
        if not torch.cuda.is_available():
            print("torch finds no CUDA device")
            return 1
        major, minor = torch.cuda.get_device_capability()
        environment |= {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "ND_ROTARY_CUDA": "1"}
    stages: list[tuple[str, list, float]] = []
    if emulated is None:
        stages.append(("build", [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], 120))
    stages.append(("build info", [sys.executable, "-m", "nd_rotary_encodings"], 30))
    stages.append(("checks", [*own, "--stage", "checks"], 130))
    if emulated is None:
        stages.append(("capture as the first call", [*own, "--stage", "capture"], 30))
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    for tool in ("memcheck", "racecheck") if sanitizer and emulated is None else ():
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=rope_"]
        stages.append((f"compute-sanitizer {tool}", [*command, *own, "--stage", "small"], 60))
    if not sanitizer:
        print("no compute-sanitizer: memcheck and racecheck are left out")
    stages.append(("benchmarks", [*own, "--stage", "benchmarks"], 240))

    end, failed = time.monotonic() + budget, []
    for name, command, limit in stages:
        # the benchmarks come last and keep their share
        left = end - time.monotonic() - (0 if name == "benchmarks" else 100)
        if left < 5 or not run_stage(name, command, min(limit, left), environment):
            failed.append(name)
        if name == "build" and failed:
            break
    print(f"\n{'all well' if not failed else 'FAILED: ' + ', '.join(failed)}")
    return len(failed)


# ---- checks


def device(emulated: str | None):
    from cuda_checks import Device

    from nd_rotary_encodings import _C

    if emulated is None:
        return Device("cuda", contextlib.nullcontext)

    @contextlib.contextmanager
    def on_host():
        _C.emulate_cuda(None)
        yield
        _C.emulate_cuda(emulated)

    _C.emulate_cuda(emulated)
    return Device("cpu", on_host)


def check(emulated: str | None, stage: str) -> int:
    import cuda_checks

    on, failed = device(emulated), 0
    checks = {
        "checks": cuda_checks.EVERYWHERE + (cuda_checks.ON_DEVICES if emulated is None else ()),
        "small": (cuda_checks.given_angles, cuda_checks.memory_layouts, cuda_checks.modules),
        "capture": (cuda_checks.capture_as_the_first_call,),
    }[stage]
    for one in checks:
        start = time.monotonic()
        try:
            one(on)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {one.__name__}", flush=True)
        else:
            print(f"passed {one.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
    return failed


# ---- benchmarks


@dataclass
class Row:
    work: str
    at_most: float | None  # the aim, in copies
    call: Callable[[], object]


def rows(x, positions, freqs) -> Iterator[Row]:
    """Every row's inputs are those of its layout; a rival that isn't there or fails leaves its rows out."""
    import definitions
    import torch

    from nd_rotary_encodings import apply_rope, apply_rope_, reference

    def train(rotate, *inputs):
        leaves = [t for t in inputs if t.requires_grad]
        grad = torch.randn_like(x)
        return lambda: torch.autograd.grad(rotate(*inputs), leaves, grad)

    learned, shared = freqs.detach().clone().requires_grad_(), freqs[:, :1].contiguous()
    moving, leaf, own = (
        positions.clone().requires_grad_(),
        x.detach().clone().requires_grad_(),
        positions.repeat(len(x), 1, 1),
    )
    half, cells = {"layout": "half"}, positions.long()
    yield Row("forward", 1.1, lambda: apply_rope(x, positions, freqs))
    yield Row("forward, half-split", 1.1, lambda: apply_rope(x, positions, freqs, **half))
    yield Row("forward in place", 1.1, lambda: apply_rope_(x, positions, freqs))
    yield Row("forward, shared frequencies", 1.1, lambda: apply_rope(x, positions, shared))
    yield Row("forward, positions of each batch entry", 1.1, lambda: apply_rope(x, own, freqs))
    yield Row("forward, int64 positions", 1.1, lambda: apply_rope(x, cells, freqs))
    yield Row("forward + backward: x", None, train(apply_rope, leaf, positions, freqs))
    yield Row("forward + backward: x, freqs", 3.0, train(apply_rope, leaf, positions, learned))
    yield Row(
        "forward + backward: x, freqs, half-split",
        3.0,
        train(lambda *t: apply_rope(*t, **half), leaf, positions, learned),
    )
    yield Row("forward + backward: x, freqs, positions", None, train(apply_rope, leaf, moving, learned))

    cos, sin = (t.to(x.dtype) for t in definitions.cos_sin(positions, freqs))
    for layout, by_table in definitions.LAYOUTS.items():
        table = torch.compile(by_table, dynamic=False)
        formed = torch.compile(definitions.from_positions(by_table), dynamic=False)
        name = f"torch.compile, {layout}"
        yield Row(f"{name}, table", None, lambda f=table: f(x, cos, sin))
        yield Row(name, None, lambda f=formed: f(x, positions, freqs))
        yield Row(f"{name}, forward + backward: x, table", None, train(table, leaf, cos, sin))
        yield Row(f"{name}, forward + backward: x, freqs", None, train(formed, leaf, positions, learned))
    yield Row("eager, half, table", None, lambda: definitions.rotate_half(x, cos, sin))
    yield Row("eager reference in float64", None, lambda: reference.apply_rope(x, positions, freqs))

    with contextlib.suppress(ImportError):
        from flash_attn.ops.triton.rotary import apply_rotary

        table = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        yield Row("flash-attn, half, table", None, lambda: apply_rotary(x, *table))
        yield Row("flash-attn, interleaved, table", None, lambda: apply_rotary(x, *table, interleaved=True))
    with contextlib.suppress(ImportError):
        from liger_kernel.ops.rope import LigerRopeFunction

        query, key = x.transpose(1, 2), x[:, :, :1].transpose(1, 2)
        doubled = [torch.cat((t[:, 0], t[:, 0]), -1)[None] for t in (cos, sin)]
        yield Row("Liger, half, table, in place", None, lambda: LigerRopeFunction.apply(query, key, *doubled))


def seconds(call: Callable[[], object], real: bool, inner: int) -> float:
    import torch

    if not real:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(inner):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / inner


def measure(row: Row, copy: Callable[[], object], real: bool) -> tuple[float, float]:
    """Medians of the call and of a copy of the same tensor, in turn."""
    for _ in range(3 if real else 1):
        row.call(), copy()
    calls, copies = [], []
    for _ in range(15 if real else 1):
        copies.append(seconds(copy, real, 5))
        calls.append(seconds(row.call, real, 5))
    return statistics.median(calls), statistics.median(copies)


def benchmark(emulated: str | None) -> int:
    import torch

    on, results, commit = device(emulated), [], "unknown"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    gpu = torch.cuda.get_device_name() if on.is_real else "emulated"
    print(f"{gpu}, torch {torch.__version__}; unit: a copy of the same tensor")
    end = time.monotonic() + 200
    # larger than the caches; then what a copy of is short
    for dtype, batch, tokens in (
        (torch.bfloat16, 16, 4096),
        (torch.float32, 16, 4096),
        (torch.bfloat16, 1, 16384),
    ):
        heads, head_dim = 16, 64
        if not on.is_real:
            batch, tokens, heads, head_dim = 2, 16, 2, 16
        torch.manual_seed(0)
        x = torch.randn(batch, tokens, heads, head_dim, dtype=dtype, device=on.name)
        positions = torch.rand(tokens, 2, device=on.name) * 100
        freqs = torch.rand(2, heads, head_dim // 2, device=on.name)
        size = f"{str(dtype).removeprefix('torch.')} [{batch}, {tokens}, {heads}, {head_dim}]"
        print(f"\n{size:58} {'copies':>7} {'us':>9} {'GB/s':>7}  aim")
        for row in rows(x, positions, freqs):
            if time.monotonic() > end:
                print("out of time: the other rows are left out")
                break
            try:
                call, copy = measure(row, x.clone, on.is_real)
            except Exception as error:
                print(f"{row.work:58} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                if "torch.compile" in row.work or "flash" in row.work or "Liger" in row.work:
                    continue
                raise
            ratio, speed = call / copy, 2 * x.nbytes / call / 1e9
            verdict = (
                "" if row.at_most is None else f"{row.at_most} {'met' if ratio <= row.at_most else 'MISSED'}"
            )
            print(f"{row.work:58} {ratio:7.2f} {call * 1e6:9.1f} {speed:7.0f}  {verdict}", flush=True)
            results.append([commit, gpu, torch.__version__, size, row.work, f"{ratio:.3f}", row.at_most or "",
                            f"{call * 1e6:.1f}", f"{copy * 1e6:.1f}"])  # fmt: skip
    if on.is_real and results:
        path = ROOT / "benchmarks" / "results" / (re.sub(r"\W+", "_", gpu.lower()) + ".csv")
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["commit", "gpu", "torch", "tensor", "work", "copies", "at_most", "us", "copy_us"]
            )
            writer.writerows(results)
        print(f"\nwritten: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--emulated", metavar="LIBRARY")
    parser.add_argument(
        "--stage", choices=["checks", "small", "capture", "benchmarks"], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.stage is None:
        sys.exit(main(options.budget, options.emulated))
    if options.stage == "benchmarks":
        sys.exit(benchmark(options.emulated))
    sys.exit(check(options.emulated, options.stage))
