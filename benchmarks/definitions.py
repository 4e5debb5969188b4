"""The rotation as users write it in plain PyTorch, eager or given to torch.compile."""

import torch
from torch import Tensor


def cos_sin(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """The table ``[..., N, H, F]`` of positions ``[..., N, P]`` and frequencies ``[P, H, F]``."""
    angles = (positions[..., None, None] * freqs).sum(-3)
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Real-valued, channels (2i, 2i + 1) a pair."""
    x0, x1 = x[..., 0::2], x[..., 1::2]
    return torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2).type_as(x)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Real-valued, channels (i, i + F) a pair, which compilers vectorize."""
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).type_as(x)


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Complex numbers, as RoPE-Mixed (Heo et al., arXiv:2403.13298) was published."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).type_as(x)


LAYOUTS = {"interleaved": rotate_interleaved, "half": rotate_half}


def from_positions(rotate):
    """One of these, with its table formed at each call."""
    return lambda x, positions, freqs: rotate(x, *cos_sin(positions, freqs))
