"""One multi-head attention layer without RoPE, with ours, and with the definition as users write it.

    python benchmarks/layer.py [--quick] [--threads N] [--instruction-set NAME] [--output FOLDER]
                               [--sizes 16 32 64] [--batch 4] [--dtype bfloat16]

256 channels, 8 heads, learned frequencies per head, size x size tokens; eager and compiled, inference and
training (forward, and backward to all parameters and the tokens). All variants take turns. Unit of time and
of peak memory: the layer without RoPE, in the same mode. README.md beside this file says how to read the
numbers.
"""

import definitions
import measure
import torch
from torch import Tensor, nn

from nd_rotary_encodings import RoPEEncodingND

E, H = 256, 8
D = E // H


class Attention(nn.Module):
    """Without RoPE."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.rope = RoPEEncodingND(2, E, H)

    def rotated(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each ``[B, N, H, D]``."""
        return self.qkv(tokens).unflatten(-1, (3, H, D)).unbind(-3)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in self.rotated(tokens, positions))
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Ours(Attention):
    """``self.rope(query, positions, key)``."""

    def rotated(self, tokens, positions):
        query, key, value = self.qkv(tokens).chunk(3, -1)
        query, key = self.rope(query, positions, key)
        return tuple(x.unflatten(-1, (H, D)) for x in (query, key, value))


class OursPacked(Attention):
    """``self.rope.rotate_qkv_(qkv, positions)``."""

    def rotated(self, tokens, positions):
        return self.rope.rotate_qkv_(self.qkv(tokens), positions).unflatten(-1, (3, H, D)).unbind(-3)


class Definition(Attention):
    """As users write it."""

    rotate = staticmethod(definitions.rotate_interleaved)

    def rotated(self, tokens, positions):
        query, key, value = super().rotated(tokens, positions)
        table = definitions.cos_sin(positions, self.rope.freqs[0])
        return self.rotate(query, *table), self.rotate(key, *table), value


class DefinitionHalf(Definition):
    rotate = staticmethod(definitions.rotate_half)


class DefinitionComplex(Definition):
    rotate = staticmethod(definitions.rotate_complex)


VARIANTS = {
    "without RoPE": Attention,
    "ours": Ours,
    "ours, packed": OursPacked,
    "definition, half": DefinitionHalf,
    "definition, interleaved": Definition,
    "definition, complex": DefinitionComplex,
}


def calls(size: int, batch: int, compiled: bool, training: bool, dtype: torch.dtype = torch.float32):
    """For each variant a function that does the work once."""
    tokens = torch.randn(batch, size * size, E, dtype=dtype, requires_grad=training)
    positions = RoPEEncodingND.position_grid((1, size, size, E), dtype=torch.float32).view(1, size * size, 2)
    results = {}
    for name, variant in VARIANTS.items():
        if compiled and variant is DefinitionComplex:
            continue  # compilers leave complex numbers to eager code
        torch.manual_seed(0)
        layer = variant().to(dtype)
        run = torch.compile(layer, dynamic=False) if compiled else layer

        def call(layer=layer, run=run):
            if training:
                layer.zero_grad()
                tokens.grad = None
                run(tokens, positions).sum().backward()
            else:
                with torch.no_grad():
                    return run(tokens, positions)

        results[name] = call
    return results


def check(rows) -> None:
    """All rotations with interleaved pairs give the same output."""
    outputs = {
        name: call() for name, call in rows.items() if name not in ("without RoPE", "definition, half")
    }
    first, *others = outputs.values()
    assert all((other - first).abs().max() < 1e-4 for other in others)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    about = measure.start(options)
    dtype = getattr(torch, options.dtype)
    sizes, budget = ([8], 0) if options.quick else (options.sizes, 10)
    results = []
    check(calls(8, 2, False, False))
    for size in sizes:
        for compiled in (False, True):
            for training in (False, True):
                torch.compiler.reset()
                rows = calls(size, options.batch, compiled, training, dtype)
                times = measure.in_turn(rows, budget)
                peaks = {name: measure.peak_bytes(call) for name, call in rows.items()}
                unit, unit_peak = times["without RoPE"], peaks["without RoPE"]
                mode = f"{'compiled' if compiled else 'eager'}, {'training' if training else 'inference'}"
                print(
                    f"\n{size} x {size} tokens, {mode}: {measure.median_ms(unit):.1f} ms, "
                    f"{unit_peak / 2**20:.1f} MiB without RoPE"
                )
                for name in rows:
                    result = measure.ratio_to(unit, times[name])
                    peak = peaks[name] / unit_peak
                    print(
                        f"  {name:26}{result['ratio']:7.3f} ({result['low']:.3f} to {result['high']:.3f})"
                        f"   peak {peak:.3f}",
                        flush=True,
                    )
                    results.append(
                        {
                            **about,
                            "size": size,
                            "batch": options.batch,
                            "dtype": options.dtype,
                            "mode": mode,
                            "variant": name,
                            **result,
                            "unit_ms": measure.median_ms(unit),
                            "peak": peak,
                            "unit_peak_mib": unit_peak / 2**20,
                        }
                    )
    measure.write(options.output, f"layer-{options.dtype}", results)


if __name__ == "__main__":
    main()
