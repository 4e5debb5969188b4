"""What it is worth that large results are written past the caches: where that begins, and what a reader pays.

    python benchmarks/streaming.py

One float32 tensor ``[B, 4096, 8, 32]``, positions ``[4096, 2]``, frequencies common to all heads. Each number
is the time with results past the caches over the time with results in them, which take turns: of the
rotation, of the rotation and a sum of its result, and of that where the tensor was made just before, too.
"""

from collections.abc import Callable
from statistics import median

import measure
import torch

from nd_rotary_encodings import _C, RoPEEncodingND, apply_rope

TOKENS, HEADS, HEAD_DIM = 4096, 8, 32
BATCHES = [1, 2, 3, 4, 5, 6, 8, 16, 32]


def with_results(past_caches: bool, work: Callable) -> Callable:
    def call():
        _C.stream_from(0 if past_caches else 1 << 62)
        return work()

    return call


def main() -> None:
    measure.keep_freed_memory()
    positions = RoPEEncodingND.position_grid((1, 64, 64, 1), dtype=torch.float32).view(TOKENS, 2)
    freqs = torch.randn(2, 1, HEAD_DIM // 2) * 0.3
    print(f"{'':10}{'rotation':>10}{'and sum':>10}{'made, too':>12}")
    for batch in BATCHES:
        x = torch.randn(batch, TOKENS, HEADS, HEAD_DIM)
        works = {
            "rotation": lambda x=x: apply_rope(x, positions, freqs),
            "and sum": lambda x=x: apply_rope(x, positions, freqs).sum(),
            "made, too": lambda x=x: apply_rope(x.neg(), positions, freqs).sum(),
        }
        calls = {(name, past): with_results(past, work) for name, work in works.items() for past in (0, 1)}
        times = measure.in_turn(calls, 5)
        ratios = [median(times[name, 1]) / median(times[name, 0]) for name in works]
        size = f"{x.nbytes >> 20} MiB"
        print(f"{size:10}{ratios[0]:10.2f}{ratios[1]:10.2f}{ratios[2]:12.2f}", flush=True)


if __name__ == "__main__":
    main()
