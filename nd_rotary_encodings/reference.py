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
    wide = wide_dtype(x.device)
    # multiplied and summed rather than a matmul, which may run in reduced precision
    angles = (positions.to(wide)[..., None, None] * freqs.to(wide)).sum(-3)
    if num_prefix_tokens:
        prefix, x = x[..., :num_prefix_tokens, :, :], x[..., num_prefix_tokens:, :, :]
    y = rotate_by_angles(x, -angles if inverse else angles, block, rotary_offset)
    if num_prefix_tokens:
        y = torch.cat((prefix.expand(*y.shape[:-3], *prefix.shape[-3:]), y), dim=-3)
    return heads_back(y, heads, head_dim_first)
