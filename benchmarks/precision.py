"""How far rotated pairs are from the exact ones, by the magnitude of positions.

    python benchmarks/precision.py

Error of a pair in units of its norm, the largest of 4096 tokens x 32 pairs; frequencies in [0.1, 1] radians
per unit. Exact: float64 angles of unrounded positions and frequencies. "float32 angles" is the definition as
users write it. Prints the table of docs/precision.md.
"""

import torch

from nd_rotary_encodings import apply_rope, reference

MAGNITUDES = [1e2, 1e3, 1e4, 1e5, 1e6]


def error(y, x, positions, freqs) -> float:
    exact = reference.apply_rope(x.double(), positions.double(), freqs.double())
    pairs, norms = ((y.double() - exact).unflatten(-1, (-1, 2)), x.double().unflatten(-1, (-1, 2)))
    return (pairs.norm(dim=-1) / norms.norm(dim=-1)).max().item()


def as_users_write_it(x, positions, freqs):
    angles = (positions[..., None, None] * freqs).sum(-3)
    cos, sin = angles.cos(), angles.sin()
    x0, x1 = x[..., 0::2], x[..., 1::2]
    return torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2).to(x.dtype)


def main() -> None:
    torch.manual_seed(0)
    freqs = torch.rand(1, 1, 32) * 0.9 + 0.1
    x = torch.randn(4096, 1, 64)
    print(
        "| positions up to | "
        + " | ".join(f"1e{round(torch.tensor(m).log10().item())}" for m in MAGNITUDES)
        + " |"
    )
    print("|---|" + "---|" * len(MAGNITUDES))
    rows = {}
    for magnitude in MAGNITUDES:
        positions = torch.rand(4096, 1) * magnitude
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            q = x.to(dtype)
            name = str(dtype)[6:]
            rows.setdefault(f"ours, {name} query", []).append(
                error(apply_rope(q, positions, freqs), q, positions, freqs)
            )
        rows.setdefault("float32 angles, float32 query", []).append(
            error(as_users_write_it(x, positions, freqs), x, positions, freqs)
        )
        for dtype in (torch.bfloat16, torch.float16):
            rounded = positions.to(dtype)
            rows.setdefault(f"ours, float32 query, positions rounded to {str(dtype)[6:]}", []).append(
                error(apply_rope(x, rounded, freqs), x, positions, freqs)
                if rounded.isfinite().all()
                else float("nan")
            )
            half = freqs.to(dtype)
            rows.setdefault(f"ours, float32 query, frequencies rounded to {str(dtype)[6:]}", []).append(
                error(apply_rope(x, positions, half), x, positions, freqs)
            )
    for name, errors in rows.items():
        print(f"| {name} | " + " | ".join("overflow" if e != e else f"{e:.0e}" for e in errors) + " |")


if __name__ == "__main__":
    main()
