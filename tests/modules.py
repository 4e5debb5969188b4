"""Modules for the tests of RoPEEncodingND, positions for them, and what they must compute."""

import numpy as np
import pytest
import torch

from nd_rotary_encodings import RoPEEncodingND, reference

# position_dim 3, 2 heads of 6 pairs
GROUPS = {
    "one group": {},
    "shared heads": {"share_heads": True},
    "partition": {"freq_group_pattern": [[True, True, False], [False, False, True]]},
    "closure": {"freq_group_pattern": [[1, 1, 0], [0, 0, 1], [1, 1, 1]]},
    "a row of False": {"freq_group_pattern": [[True, True, True], [False, False, False]]},
    "only a row of False": {"freq_group_pattern": [[False, False, False]]},
    "an axis unused": {"freq_group_pattern": [[True, False, True]]},
    "equal rows": {"freq_group_pattern": [[1, 0, 1], [1, 0, 1]]},
    "unequal groups": {
        "freq_group_pattern": [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]],
        "enforce_freq_groups_equal": False,
    },
    "groups of one pair": {"freq_group_pattern": [[1, 0, 1], [0, 1, 1]] * 3},
    "more groups than pairs": {"freq_group_pattern": [[1, 1, 1]] * 7, "enforce_freq_groups_equal": False},
    "a theta per group": {"freq_group_pattern": [[1, 1, 0], [1, 1, 1]], "rope_base_theta": [[5.0], [100.0]]},
    "a theta per axis": {"rope_base_theta": torch.tensor([[5.0, 7.0, 11.0]])},
}
every_group = pytest.mark.parametrize("options", GROUPS.values(), ids=GROUPS.keys())


def make(position_dim=3, embed_dim=24, n_heads=2, **options):
    return RoPEEncodingND(position_dim, embed_dim, n_heads, **options)


def pixels(*shape, dtype=torch.float32):
    """Positions in true units, none of which look normalized."""
    return (torch.rand(*shape, dtype=torch.float64) * 20 - 5).to(dtype)


def group_sizes(module):
    size, remainder = divmod(module.head_dim // 2, module.n_freq_groups)
    return [size + 1 if group < remainder else size for group in range(module.n_freq_groups)]


def full_frequencies(module):
    """`[P, H, F]` in numpy: each group's frequencies at its axes and pairs, zero elsewhere."""
    full = np.zeros((module.position_dim, module.n_heads, module.head_dim // 2))
    start = 0
    for row, freqs, size in zip(
        module.freq_group_pattern.tolist(), module.freqs, group_sizes(module), strict=True
    ):
        values = iter(freqs.detach().double().numpy())
        for axis, used in enumerate(row):
            if used:
                full[axis, :, start : start + size] = next(values)
        start += size
    return full


def by_complex_numbers(x, positions, freqs):
    """Pairs of channels as complex numbers, times exp(i angle); all in float64."""
    x, positions = x.detach().double().numpy(), positions.detach().double().numpy()
    angles = np.einsum("...p,phf->...hf", positions, freqs)
    pairs = x.reshape(*x.shape[:-1], *freqs.shape[1:], 2)
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    flat = np.stack([rotated.real, rotated.imag], -1)
    return torch.from_numpy(flat.reshape(*flat.shape[:-3], x.shape[-1]))


def by_reference(module, x, positions):
    """The plain-PyTorch definition on float64 copies, differentiable."""
    freqs = module.grouped_rope_freqs_tensor(module.freqs).sum(1)
    return reference.apply_rope(x.double(), positions.double(), freqs.double(), module.n_heads)
