"""The rotation alone against a copy of the same tensor.

    python benchmarks/op.py [--quick] [--threads N] [--instruction-set NAME] [--output FOLDER]

Unit: the median time of ``x.clone()`` of the row's own tensor, or of ``x.sin()`` for calls on a tiny tensor.
A row and its unit take turns, so that a busy machine slows both. Each row is checked against the reference
before it is timed. README.md beside this file says how to read the numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import measure
import torch
from torch import Tensor

from nd_rotary_encodings import RoPEEncodingND, apply_rope, apply_rope_, reference

B, N, E, H = 4, 64 * 64, 256, 8
D, F = E // H, E // H // 2


@dataclass
class Row:
    work: str
    at_most: float | None
    call: Callable[[], object]
    unit: Callable[[], object]
    inner: int = 1  # calls per timing


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(y: Tensor, x: Tensor, positions: Tensor, freqs: Tensor, **settings) -> None:
    wanted = reference.apply_rope(x[:1].double(), positions[:1], freqs, **settings)
    error = (y[:1].double() - wanted).abs().max() / x[:1].abs().max()
    assert error < TOLERANCE[x.dtype], f"wrong result, error {error:.1e}"


def grid(n: int) -> Tensor:
    return RoPEEncodingND.position_grid((1, n, n, E), dtype=torch.float32).view(1, n * n, 2)


def train(x: Tensor, positions: Tensor, freqs: Tensor, grad: Tensor, rotate=apply_rope) -> tuple[Tensor, ...]:
    inputs = [t for t in (x, positions, freqs) if t.requires_grad]
    return torch.autograd.grad(rotate(x, positions, freqs), inputs, grad)


@torch.no_grad()
def infer(module, *inputs):
    return module(*inputs)


def forward_rows(x: Tensor, positions: Tensor, freqs: Tensor) -> Iterator[Row]:
    check(apply_rope(x, positions, freqs), x, positions, freqs)
    yield Row("forward", 1.4, lambda: apply_rope(x, positions, freqs), x.clone)
    check(apply_rope(x, positions, freqs, layout="half"), x, positions, freqs, block=D)
    yield Row("forward, half-split", None, lambda: apply_rope(x, positions, freqs, layout="half"), x.clone)
    own = positions.repeat(B, 1, 1)
    check(apply_rope(x, own, freqs), x, own, freqs)
    yield Row("forward, positions [4, N, 2]", 2.2, lambda: apply_rope(x, own, freqs), x.clone)
    cells = positions.long()
    check(apply_rope(x, cells, freqs), x, cells, freqs)
    yield Row("forward, int64 positions", None, lambda: apply_rope(x, cells, freqs), x.clone)
    heads = x.transpose(1, 2).contiguous()
    check(
        apply_rope(heads, positions, freqs, head_dim_first=True), heads, positions, freqs, head_dim_first=True
    )
    yield Row(
        "forward, [B, H, N, D]",
        None,
        lambda: apply_rope(heads, positions, freqs, head_dim_first=True),
        x.clone,
    )
    scratch = x.clone()
    check(apply_rope_(scratch, positions, freqs), x, positions, freqs)
    yield Row("forward in place", 1.2, lambda: apply_rope_(scratch, positions, freqs), x.clone)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        other = x.to(dtype)
        check(apply_rope(other, positions, freqs), other, positions, freqs)
        unit, of, at_most = (other.clone, "own", 8) if dtype == torch.float64 else (x.clone, "float32", None)
        name = f"forward, {str(dtype)[6:]} (unit: {of} clone)"
        yield Row(name, at_most, lambda other=other: apply_rope(other, positions, freqs), unit)
    small, small_positions = torch.randn(B, 16 * 16, H, D), grid(16)
    check(apply_rope(small, small_positions, freqs), small, small_positions, freqs)
    yield Row(
        "forward, N = 16 x 16", 3, lambda: apply_rope(small, small_positions, freqs), small.clone, inner=10
    )


def backward_rows(x: Tensor, positions: Tensor, freqs: Tensor) -> Iterator[Row]:
    grad = torch.randn_like(x)
    for work, at_most, needs in (
        ("forward + backward: x", 3.5, (True, False, False)),
        ("forward + backward: x, freqs", 5, (True, False, True)),
        ("forward + backward: x, freqs, positions", 6, (True, True, True)),
    ):
        inputs = [t.clone().requires_grad_(n) for t, n in zip((x, positions, freqs), needs, strict=True)]
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        wanted = train(*wide, grad.double(), reference.apply_rope)
        for got, exact in zip(train(*inputs, grad), wanted, strict=True):
            assert (got - exact).abs().max() < 1e-4 * exact.abs().max(), work
        yield Row(work, at_most, lambda inputs=inputs: train(*inputs, grad), x.clone)


def tiny_rows() -> Iterator[Row]:
    x, positions = torch.randn(1, 2, 8), torch.tensor([[[3.0, 4.0], [1.0, 2.0]]])
    module = RoPEEncodingND(2, 8, 2)
    learned, freqs, split = module.freqs[0], module.freqs[0].detach(), x.view(1, 2, 2, 4)
    trained = x.clone().requires_grad_()
    for work, at_most, call in (
        ("call on [1, 2, 8]: functional", 4, lambda: apply_rope(split, positions, freqs)),
        ("call on [1, 2, 8]: functional, training", 15, lambda: apply_rope(split, positions, learned)),
        ("call on [1, 2, 8]: module", 12, lambda: infer(module, x, positions)),
        ("call on [1, 2, 8]: module, training", 30, lambda: module(trained, positions)),
    ):
        yield Row(work, at_most, call, x.sin, inner=2000)


def main() -> None:
    options = measure.parser(__doc__).parse_args()
    about = measure.start(options)
    print(f"{'':56}{'ratio':>8}{'quartiles':>16}{'at most':>9}{'unit':>12}")
    x, positions, freqs = torch.randn(B, N, H, D), grid(64), torch.randn(2, H, F) * 0.3
    results = []
    for rows in (forward_rows(x, positions, freqs), backward_rows(x, positions, freqs), tiny_rows()):
        for row in rows:
            times = measure.in_turn(
                {"unit": row.unit, "work": row.call}, 0 if options.quick else 1, row.inner
            )
            result = measure.ratio_to(times["unit"], times["work"])
            result["unit_us"] = measure.median_ms(times["unit"]) * 1e3
            quartiles = f"{result['low']:.2f} to {result['high']:.2f}"
            numbers = (
                f"{result['ratio']:8.2f}{quartiles:>16}{row.at_most or '':>9}{result['unit_us']:9.1f} us"
            )
            print(f"{row.work:56}{numbers}", flush=True)
            results.append({**about, "work": row.work, "at_most": row.at_most, **result})
    measure.write(options.output, "op", results)


if __name__ == "__main__":
    main()
