"""One multi-head attention layer without RoPE, with ours, and with the definition as users write it.

    python benchmarks/layer.py [--quick] [--threads N] [--sizes 16 32 64] [--batch 4] [--output FILE.csv]

float32, 256 channels, 8 heads, learned frequencies per head, size x size tokens; eager and compiled,
inference and training (forward, and backward to all parameters and the tokens). All variants take turns. Unit
of time and of peak memory: the layer without RoPE, in the same mode. README.md beside this file says how to
read the numbers.
"""

import statistics

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
    """Real-valued, interleaved pairs."""

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        x0, x1 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2)

    def rotated(self, tokens, positions):
        query, key, value = super().rotated(tokens, positions)
        angles = (positions[..., None, None] * self.rope.freqs[0]).sum(-3)
        return self.rotate(query, angles), self.rotate(key, angles), value


class DefinitionHalf(Definition):
    """Real-valued, half-split pairs, which compilers vectorize."""

    def rotate(self, x, angles):
        cos, sin = angles.cos(), angles.sin()
        x0, x1 = x.chunk(2, dim=-1)
        return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1)


class DefinitionComplex(Definition):
    """Complex numbers, as RoPE-Mixed (Heo et al., arXiv:2403.13298) was published."""

    def rotate(self, x, angles):
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


VARIANTS = {
    "without RoPE": Attention,
    "ours": Ours,
    "ours, packed": OursPacked,
    "definition, half": DefinitionHalf,
    "definition, interleaved": Definition,
    "definition, complex": DefinitionComplex,
}


def calls(size: int, batch: int, compiled: bool, training: bool):
    """For each variant a function that does the work once."""
    tokens = torch.randn(batch, size * size, E, requires_grad=training)
    positions = RoPEEncodingND.position_grid((1, size, size, E), dtype=torch.float32).view(1, size * size, 2)
    results = {}
    for name, variant in VARIANTS.items():
        if compiled and variant is DefinitionComplex:
            continue  # compilers leave complex numbers to eager code
        torch.manual_seed(0)
        layer = variant()
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
    options = parser.parse_args()
    about = measure.start(options)
    sizes, budget = ([8], 0) if options.quick else (options.sizes, 10)
    results = []
    check(calls(8, 2, False, False))
    for size in sizes:
        for compiled in (False, True):
            for training in (False, True):
                torch.compiler.reset()
                rows = calls(size, options.batch, compiled, training)
                for call in rows.values():
                    call()
                round_takes = sum(measure.seconds(call) for call in rows.values())
                times = {name: [] for name in rows}
                for _ in range(min(max(int(budget / round_takes), 5), 101)):
                    for name, call in rows.items():
                        times[name].append(measure.seconds(call))
                peaks = {name: measure.peak_bytes(call) for name, call in rows.items()}
                unit, unit_peak = times["without RoPE"], peaks["without RoPE"]
                mode = f"{'compiled' if compiled else 'eager'}, {'training' if training else 'inference'}"
                print(
                    f"\n{size} x {size} tokens, {mode}: {statistics.median(unit) * 1e3:.1f} ms, "
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
                            "mode": mode,
                            "variant": name,
                            **result,
                            "unit_ms": statistics.median(unit) * 1e3,
                            "peak": peak,
                            "unit_peak_mib": unit_peak / 2**20,
                        }
                    )
    measure.write(options.output, results)


if __name__ == "__main__":
    main()
