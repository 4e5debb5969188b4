"""The definition of the rotation in plain PyTorch: the oracle of the tests, and what runs where no kernel
does.

Differentiable to any order, in forward mode and under ``vmap``, on every device; it stores the angles.
"""

import torch
from torch import Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """The most precise real dtype of a device, in which angles are formed."""
    return torch.float32 if device.type == "mps" else torch.float64


def pair_channels(x: Tensor, pairs: int, block: int, rotary_offset: int) -> tuple[Tensor, Tensor]:
    """The two channels ``[..., pairs]`` of each pair of ``x`` ``[..., D]``."""
    rotary = x[..., rotary_offset : rotary_offset + 2 * pairs]
    x0, x1 = rotary.view(*x.shape[:-1], 2 * pairs // block, 2, block // 2).unbind(-2)
    return x0.reshape(*x.shape[:-1], pairs), x1.reshape(*x.shape[:-1], pairs)


def join_channels(y0: Tensor, y1: Tensor, block: int) -> Tensor:
    """The inverse of :func:`pair_channels`, for the rotated channels alone."""
    lead, channels = y0.shape[:-1], 2 * y0.shape[-1]
    y0, y1 = (y.view(*lead, channels // block, block // 2) for y in (y0, y1))
    return torch.stack((y0, y1), dim=-2).view(*lead, channels)


def heads_last(x: Tensor, heads: int, head_dim_first: bool) -> Tensor:
    """``x`` as ``[..., N, H, D]``."""
    if heads:
        return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)
    return x.transpose(-3, -2) if head_dim_first else x


def heads_back(y: Tensor, heads: int, head_dim_first: bool) -> Tensor:
    """The inverse of :func:`heads_last`."""
    if heads:
        return y.reshape(*y.shape[:-2], heads * y.shape[-1])
    return y.transpose(-3, -2) if head_dim_first else y


def queries_and_keys(qkv: Tensor, head_dim_first: bool) -> Tensor:
    """Of ``qkv`` ``[..., N, 3, H, D]`` or ``[..., 3, H, N, D]`` queries and keys, as one more leading dim."""
    return qkv.narrow(-4, 0, 2) if head_dim_first else qkv.narrow(-3, 0, 2).transpose(-4, -3)


def rotated_pairs(x: Tensor, pairs: int, settings: tuple) -> tuple[Tensor, Tensor]:
    """The channels ``[..., N, H, F]`` of each pair that is rotated, in float32 at least."""
    heads, block, rotary_offset, prefix, head_dim_first, _ = settings
    x = heads_last(x, heads, head_dim_first)
    if prefix:
        x = x[..., prefix:, :, :]
    return pair_channels(x.to(torch.promote_types(x.dtype, torch.float32)), pairs, block, rotary_offset)


def sum_over_axes(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Tensor:
    """``sum_a positions[..., a] * freqs[a]`` for ``freqs`` ``[P, H | 1, F]``."""
    # multiplied and summed rather than a matmul, which may run in reduced precision
    return (positions.to(dtype)[..., None, None] * freqs.to(dtype)).sum(-3)


def sum_over_axes_backward(
    grad: Tensor, positions: Tensor, freqs: Tensor, need_positions: bool, need_freqs: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of :func:`sum_over_axes`, formed in the dtype of ``grad``. TorchScript compiles this, too."""
    grad_positions: Tensor | None = None
    grad_freqs: Tensor | None = None
    if need_positions:
        sums = [(grad * f).sum((-2, -1)) for f in freqs.to(grad.dtype).unbind(0)]
        grad_positions = torch.stack(sums, -1).sum_to_size(positions.shape).to(positions.dtype).contiguous()
    if need_freqs:
        full = positions.to(grad.dtype).expand(grad.shape[:-2] + positions.shape[-1:])
        sums = [(grad * p.unsqueeze(-1).unsqueeze(-1)).sum_to_size(freqs.shape[1:]) for p in full.unbind(-1)]
        grad_freqs = torch.stack(sums).to(freqs.dtype).contiguous()
    return grad_positions, grad_freqs


def rotate_by_angles(x: Tensor, angles: Tensor, block: int = 2, rotary_offset: int = 0) -> Tensor:
    """``x`` ``[..., H, D]`` rotated by ``angles`` ``[..., H | 1, F]``, in the dtype of ``x``."""
    pairs = angles.shape[-1]
    wide = wide_dtype(x.device)
    x0, x1 = pair_channels(x.to(wide), pairs, block, rotary_offset)
    cos, sin = angles.to(wide).cos(), angles.to(wide).sin()
    y = join_channels(x0 * cos - x1 * sin, x0 * sin + x1 * cos, block).to(x.dtype)
    if y.shape[-1] == x.shape[-1]:
        return y
    x = x.expand(*y.shape[:-1], x.shape[-1])
    return torch.cat((x[..., :rotary_offset], y, x[..., rotary_offset + 2 * pairs :]), dim=-1)


def apply_rope(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    heads: int = 0,
    block: int = 2,
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """``nd_rotary_encodings.apply_rope`` by its definition; ``block`` is the layout as a number of channels,
    and with ``heads`` ``x`` is ``[..., heads * D]``."""
    x = heads_last(x, heads, head_dim_first)
    angles = sum_over_axes(positions, freqs, wide_dtype(x.device))
    if num_prefix_tokens:
        prefix, x = x[..., :num_prefix_tokens, :, :], x[..., num_prefix_tokens:, :, :]
    y = rotate_by_angles(x, -angles if inverse else angles, block, rotary_offset)
    if num_prefix_tokens:
        y = torch.cat((prefix.expand(*y.shape[:-3], *prefix.shape[-3:]), y), dim=-3)
    return heads_back(y, heads, head_dim_first)


def apply_rope_backward(
    grad: Tensor, y: Tensor, positions: Tensor, freqs: Tensor, settings: tuple, needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``x``, ``positions`` and ``freqs`` from the output ``y``; None where not needed."""
    inverse = settings[-1]
    grad_x = apply_rope(grad, positions, freqs, *settings[:-1], inverse=not inverse) if needs[0] else None
    if not (needs[1] or needs[2]):
        return grad_x, None, None
    g0, g1 = rotated_pairs(grad, freqs.shape[-1], settings)
    y0, y1 = rotated_pairs(y, freqs.shape[-1], settings)
    grad_angles = g0 * y1 - g1 * y0 if inverse else g1 * y0 - g0 * y1
    return grad_x, *sum_over_axes_backward(grad_angles, positions, freqs, *needs[1:])
