"""How time and memory of a rotation grow with tokens, axes and channels, beside compiled and eager PyTorch.

    python benchmarks/scaling.py [--quick] [--threads N] [--instruction-set NAME] [--output FOLDER]

One float32 tensor ``[1, N, 8, D]``, positions ``[1, N, P]``, learned frequencies per head: one of N, P and
D is varied from N = 4096, P = 2 and D = 32, N also with one thread. Training gives gradients to the tensor
and the frequencies. All take turns. Unit of time: a copy of the tensor; of peak memory: its size. In
training 2 of the peak are the result and the gradient.
"""

import itertools
from collections.abc import Callable
from functools import partial

import definitions
import measure
import torch
from torch import Tensor

from nd_rotary_encodings import apply_rope

HEADS = 8
BASE = {"tokens": 4096, "channels": 32, "axes": 2}
SWEEPS = {
    "tokens": [4**n for n in range(3, 11)],
    "axes": [1, 2, 3, 4, 5, 6],
    "channels": [8, 16, 32, 64, 128, 256],
}


VARIANTS = {
    "ours": apply_rope,
    "torch.compile, half": torch.compile(definitions.from_positions(definitions.rotate_half), dynamic=False),
    "eager, complex": definitions.from_positions(definitions.rotate_complex),
}


def calls(x: Tensor, axes: int, training: bool) -> dict[str, Callable]:
    positions, grad = torch.rand(1, x.shape[1], axes) * 64, torch.randn_like(x)
    freqs = (torch.randn(axes, HEADS, x.shape[-1] // 2) * 0.3).requires_grad_(training)
    x = x.clone().requires_grad_(training)

    def call(rotate):
        y = rotate(x, positions, freqs)
        return torch.autograd.grad(y, (x, freqs), grad) if training else y

    return {name: partial(call, rotate) for name, rotate in VARIANTS.items()}


def main() -> None:
    options = measure.parser(__doc__).parse_args()
    about = measure.start(options)
    budget = 0 if options.quick else 2
    results = []
    sweeps = [(options.threads, *sweep) for sweep in SWEEPS.items()]
    if options.threads > 1:
        # a million tokens once: the C library keeps what was freed
        sweeps.append((1, "tokens", SWEEPS["tokens"][:-1]))
    for threads, varied, values in sweeps:
        torch.set_num_threads(threads)
        for value, training in itertools.product(values[:1] if options.quick else values, (False, True)):
            torch.compiler.reset()
            mode = "training" if training else "inference"
            setting = {**BASE, varied: value}
            x = torch.randn(1, setting["tokens"], HEADS, setting["channels"])
            inner = max(1, 2**20 // x.numel())  # enough work for the clock
            work = calls(x, setting["axes"], training)
            if setting["tokens"] > 2**18:
                del work["eager, complex"]  # needs 7 GiB
            times = measure.in_turn({"copy": x.clone, **work}, budget, inner)
            unit = times.pop("copy")
            for name, its in times.items():
                result = measure.ratio_to(unit, its)
                peak = measure.peak_bytes(work[name]) / x.nbytes
                milliseconds = measure.median_ms(its)
                print(
                    f"{threads} threads {varied:9}{value:9} {mode:10} {name:20}{milliseconds:11.3f} ms"
                    f"{result['ratio']:8.2f} copies   peak {peak:.2f}",
                    flush=True,
                )
                row = {
                    "threads": threads,
                    "varied": varied,
                    "value": value,
                    "mode": mode,
                    "variant": name,
                    **result,
                }
                results.append({**about, **row, "ms": milliseconds, "peak": peak})
    measure.write(options.output, "scaling", results)


if __name__ == "__main__":
    main()
