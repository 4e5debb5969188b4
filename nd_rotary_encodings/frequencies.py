"""Initial values of the rotary frequencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def init_nd_freqs(
    position_dim: int,
    head_dim: int,
    num_heads: int,
    freq_group_pattern: Tensor | Sequence[Sequence[bool]],
    enforce_freq_groups_equal: bool = True,
    thetas: Tensor | float | Sequence[Sequence[float]] = 10.0,
    rotate: bool = True,
    max_rotation_angle: float = 2 * math.pi,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Initial frequencies of N-dimensional rotary embeddings, one tensor per frequency group.

    The F = head_dim / 2 channel pairs of a head are dealt out to G groups, F_g to group g. On axis a, head h
    and pair i < F_g of that group, the frequency is `cos(u[a, h]) * theta[g, a] ** (-i / F_g)`: the geometric
    decay of RoPE (arXiv 2104.09864), scaled by the projection of a random direction as in RoPE-Mixed
    (arXiv 2403.13298), but with a direction of its own for each axis.

    One seed gives the same frequencies on every run: each `u` is one `torch.rand(1)`, drawn group by group,
    within a group axis by axis, and within an axis head by head. Axes that a group lacks draw nothing.

    Args:
        position_dim: Number of position axes, P.
        head_dim: Channels of a head; even.
        num_heads: Heads with frequencies of their own, H; 1 to share one set among all.
        freq_group_pattern: `[G, P]`, anything `torch.as_tensor` takes, read as bool: group g uses axis a. A
            row of False is a group without frequencies, whose channels are not rotated. The values are read
            on the CPU.
        enforce_freq_groups_equal: If True, F must be divisible by G. If False, the first `F % G` groups get
            one pair more than the others.
        thetas: Base of the decay: one number for all, or a 2-D `[G, P]` (a size of 1 broadcasts). Entries of
            axes that a group lacks are ignored.
        rotate: If False, every `u` is 0 and nothing is drawn.
        max_rotation_angle: `u` is uniform in `[0, max_rotation_angle)`.
        dtype: Floating-point type of the frequencies. Default: PyTorch's default dtype.
        device: Where to put the results. Default: where `torch.as_tensor(freq_group_pattern)` would be, hence
            the pattern's own device, or that of a surrounding `with torch.device(...)`.

    Returns:
        A list of G tensors `[P_g, H, F_g]`, where P_g counts the axes of group g, in ascending order; and
        int64 `[G, 2]`, the first pair of each group and the one after its last.

    Raises:
        ValueError: If `head_dim` is odd; if `freq_group_pattern` is not `[G, P]` with at least one row, or is
            on the meta device; if F is not divisible by G though `enforce_freq_groups_equal`; if `thetas` is
            neither a single number nor broadcastable to `[G, P]`; if `dtype` is not a floating-point type.
    """
    _check_head_dim(head_dim)
    dtype = _float_dtype(dtype)
    if device is None:
        device = torch.as_tensor(freq_group_pattern).device
    pattern = read_freq_group_pattern(freq_group_pattern, position_dim)
    thetas = _broadcast_thetas(thetas, pattern.shape, dtype, device)
    sizes = group_sizes(head_dim // 2, len(pattern), enforce_freq_groups_equal)

    freqs = []
    for uses_axis, theta, size in zip(pattern.tolist(), thetas, sizes, strict=True):
        axes = [axis for axis in range(position_dim) if uses_axis[axis]]
        angles = _draw_angles(len(axes), num_heads, max_rotation_angle if rotate else None, dtype, device)
        exponents = -torch.arange(size, dtype=dtype, device=device) / size
        decay = theta[axes].unsqueeze(-1) ** exponents
        freqs.append(angles.cos().unsqueeze(-1) * decay.unsqueeze(1))

    ends = accumulate(sizes)
    ranges = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return freqs, torch.tensor(ranges, dtype=torch.int64, device=device)


def init_2d_freqs_rope_mixed(
    head_dim: int,
    n_heads: int,
    theta: float = 10.0,
    rotate: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Initial frequencies for two position axes, growing with the pair index.

    The frequency of axis a, head h and pair i is `cos(u[a, h]) * theta ** (2 * i / head_dim)`, `u` uniform in
    `[0, 2 * pi)`, one `torch.rand(1)` each, axis by axis and head by head within an axis.

    In spite of the name, this is not the initialization of RoPE-Mixed (arXiv 2403.13298), whose magnitudes
    `theta ** (-4 * j / head_dim)` decay and come in pairs of orthogonal directions. Name and values are kept
    for those who call this function in the earlier, pure-PyTorch `nd-rotary-encodings`.

    Args:
        head_dim: Channels of a head; even.
        n_heads: Number of heads, H.
        theta: Base of the growth.
        rotate: If False, every `u` is 0 and nothing is drawn.
        dtype: Floating-point type of the result. Default: PyTorch's default dtype.
        device: Where to put the result. Default: PyTorch's default device.

    Returns:
        `[2, H, head_dim / 2]`.

    Raises:
        ValueError: If `head_dim` is odd or `dtype` is not a floating-point type.
    """
    _check_head_dim(head_dim)
    dtype = _float_dtype(dtype)
    angles = _draw_angles(2, n_heads, 2 * math.pi if rotate else None, dtype, device)
    growth = theta ** (torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)
    return angles.cos().unsqueeze(-1) * growth


def group_sizes(n_pairs: int, n_groups: int, enforce_equal: bool = True) -> list[int]:
    """Number of channel pairs of each frequency group; the first `n_pairs % n_groups` groups get one more.

    Args:
        n_pairs: Channel pairs to deal out.
        n_groups: Number of groups.
        enforce_equal: If True, a remainder is an error.

    Returns:
        `n_groups` sizes that sum to `n_pairs`.

    Raises:
        ValueError: If there is a remainder though `enforce_equal`.
    """
    size, remainder = divmod(n_pairs, n_groups)
    if remainder and enforce_equal:
        raise ValueError(f"RoPE encodings ({n_pairs}) not evenly divisible by frequency groups ({n_groups})")
    return [size + (group < remainder) for group in range(n_groups)]


def read_freq_group_pattern(
    freq_group_pattern: Tensor | Sequence[Sequence[bool]], position_dim: int
) -> Tensor:
    """The pattern of frequency groups as a bool tensor on the CPU, where its values can be read.

    Args:
        freq_group_pattern: `[G, P]`, anything `torch.as_tensor` takes.
        position_dim: Number of position axes, P.

    Returns:
        bool `[G, P]`, on the CPU even under `with torch.device(...)`.

    Raises:
        ValueError: If the pattern is not `[G, P]` with at least one row, or has no values (meta device).
    """
    if isinstance(freq_group_pattern, Tensor) and freq_group_pattern.is_meta:
        raise ValueError(
            "Expected freq_group_pattern to hold values, as they decide the shapes of the frequencies, "
            "got a tensor on the meta device; create it with device='cpu'"
        )
    pattern = torch.as_tensor(freq_group_pattern, dtype=torch.bool, device="cpu")
    if pattern.ndim != 2:
        raise ValueError(f"Expected 2D tensor for freq_group_pattern, got shape {tuple(pattern.shape)}")
    if pattern.shape[1] != position_dim:
        raise ValueError(
            "Expected second dimension of freq_group_pattern to have size equal to position_dim "
            f"({position_dim}), got shape {tuple(pattern.shape)}"
        )
    if len(pattern) == 0:
        raise ValueError(
            f"Expected freq_group_pattern to have at least one row, got shape {tuple(pattern.shape)}"
        )
    return pattern


def _broadcast_thetas(
    thetas: Tensor | float | Sequence[Sequence[float]],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    thetas = torch.as_tensor(thetas, dtype=dtype, device=device)
    if thetas.numel() == 1:
        return thetas.reshape(1, 1).expand(shape)
    # 1-D is refused although [P] would broadcast: it may be meant as one base per group.
    if thetas.ndim != 2:
        raise ValueError(
            f"Expected thetas to either be a scalar or a 2D tensor, got shape {tuple(thetas.shape)}"
        )
    if any(given not in (1, wanted) for given, wanted in zip(thetas.shape, shape, strict=True)):
        raise ValueError(
            "Expected thetas to be broadcastable to [n_freq_groups, position_dim] "
            f"{tuple(shape)}, got shape {tuple(thetas.shape)}"
        )
    return thetas.expand(shape)


def _draw_angles(
    n_axes: int,
    n_heads: int,
    max_angle: float | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """`[n_axes, n_heads]`, uniform in `[0, max_angle)`; zeros, and no draw, if that is None."""
    angles = torch.zeros(n_axes, n_heads, dtype=dtype, device=device)
    if max_angle is not None:
        flat = angles.view(-1)
        # A single call for all of them would give other numbers for the same seed on some devices.
        for index in range(len(flat)):
            flat[index] = torch.rand(1, dtype=dtype, device=device)
        angles *= max_angle
    return angles


def _check_head_dim(head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")


def _float_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"Expected dtype to be a floating-point type, got {dtype}")
    return dtype
