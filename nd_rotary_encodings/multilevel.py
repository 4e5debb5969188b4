"""Positions and frequency groups for feature maps of several resolutions (levels)."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class FreqGroupPattern(Enum):
    """How the spatial axes and the level axis share frequency groups."""

    SINGLE = "single"
    PARTITION = "partition"
    CLOSURE = "closure"

    def __str__(self) -> str:
        return self.value


def get_multilevel_freq_group_pattern(
    position_dim: int,
    pattern_name: str | FreqGroupPattern,
    device: torch.device | str | None = None,
) -> Tensor:
    """The `freq_group_pattern` of a named scheme, for positions with the level as last coordinate.

    Args:
        position_dim: Number of spatial axes, P, the level not counted.
        pattern_name: A member of `FreqGroupPattern` or its value. `"single"`: one group of all axes.
            `"partition"`: the spatial axes; the level. `"closure"`: the spatial axes; the level; all axes.
        device: Where to put the result. Default: PyTorch's default device.

    Returns:
        `[1 | 2 | 3, P + 1]` of PyTorch's default dtype, 1 where the group uses the axis and 0 elsewhere.

    Raises:
        ValueError: If `pattern_name` is none of these, or `position_dim` is less than 1.
    """
    try:
        pattern = FreqGroupPattern(pattern_name)
    except ValueError:
        names = ", ".join(repr(str(member)) for member in FreqGroupPattern)
        raise ValueError(f"Unrecognized pattern_name {pattern_name!r}, expected one of {names}") from None
    if position_dim < 1:
        raise ValueError(f"Expected position_dim to be at least 1, got {position_dim}")

    spatial = [1.0] * position_dim + [0.0]
    level = [0.0] * position_dim + [1.0]
    everything = [1.0] * (position_dim + 1)
    groups = {
        FreqGroupPattern.SINGLE: [everything],
        FreqGroupPattern.PARTITION: [spatial, level],
        FreqGroupPattern.CLOSURE: [spatial, level, everything],
    }
    return torch.tensor(groups[pattern], device=device)


def prep_multilevel_positions(
    spatial_positions: Tensor,
    batch_indices: Tensor,
    level_indices: Tensor,
    level_spatial_shapes: Tensor,
) -> Tensor:
    """Brings the positions of several levels to the scale of the largest one and appends the level.

    A position is divided by `shape[level] / max(shape over levels)`, axis by axis and per batch element, so
    that the same place has the same coordinates on every level.

    Integer positions count cells, floating-point ones measure coordinates: the integer 3 means the center of
    the fourth cell and becomes 3.5 before scaling, while 3.0 is the edge of that cell and stays.

    Args:
        spatial_positions: `[..., P]`, at least 2-D; any integer or floating-point type.
        batch_indices: `[...]`, an integer type: the batch element of each position. Size-1 dims broadcast.
        level_indices: `[...]`, an integer type: the level of each position. Size-1 dims broadcast.
        level_spatial_shapes: `[L, P]`, or `[B, L, P]` where batch elements differ: the size of each level;
            any integer or floating-point type.

    Returns:
        `[..., P + 1]`, the level index last. Floating-point positions keep their dtype, integer ones give
        PyTorch's default dtype; either is rounded once, from at least float32.

    Raises:
        ValueError: If a shape or a dtype is not as above. Indices out of range raise PyTorch's own error;
            with `[L, P]` shapes, the values of `batch_indices` are not looked at.
    """
    _check_positions_and_shapes(spatial_positions, level_spatial_shapes)
    _check_indices(batch_indices, "batch_indices", spatial_positions.shape[:-1])
    _check_indices(level_indices, "level_indices", spatial_positions.shape[:-1])

    counts_cells = not spatial_positions.is_floating_point()
    dtype = torch.get_default_dtype() if counts_cells else spatial_positions.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if level_spatial_shapes.is_floating_point():
        wide = torch.promote_types(wide, level_spatial_shapes.dtype)

    shapes = level_spatial_shapes.to(wide)
    scales = shapes / shapes.amax(-2, keepdim=True)
    levels = level_indices.long()  # uint8 would index like a mask
    scale = scales[levels] if scales.ndim == 2 else scales[batch_indices.long(), levels]

    positions = spatial_positions.to(wide)
    if counts_cells:
        positions = positions + 0.5
    positions = (positions / scale).to(dtype)
    levels = levels.to(positions).expand(positions.shape[:-1])
    return torch.cat([positions, levels.unsqueeze(-1)], dim=-1)


def _check_positions_and_shapes(positions: Tensor, level_shapes: Tensor) -> None:
    if positions.ndim < 2:
        raise ValueError(
            f"Expected at least 2 dimensions for spatial_positions, got shape {tuple(positions.shape)}"
        )
    for name, tensor in (("spatial_positions", positions), ("level_spatial_shapes", level_shapes)):
        if tensor.is_complex():
            raise ValueError(f"Expected {name} to be real, got dtype {tensor.dtype}")
    if level_shapes.ndim not in (2, 3) or level_shapes.shape[-1] != positions.shape[-1]:
        raise ValueError(
            "Expected level_spatial_shapes to be [n_levels, P] or [batch, n_levels, P], where P is the last "
            f"dim of spatial_positions ({positions.shape[-1]}), got shape {tuple(level_shapes.shape)}"
        )
    if level_shapes.shape[-2] == 0:
        raise ValueError(
            f"Expected level_spatial_shapes to have at least one level, got shape {tuple(level_shapes.shape)}"
        )


def _check_indices(indices: Tensor, name: str, leading: torch.Size) -> None:
    if indices.ndim != len(leading) or any(
        given not in (1, wanted) for given, wanted in zip(indices.shape, leading, strict=True)
    ):
        raise ValueError(
            f"Expected {name} to have the leading dims of spatial_positions {tuple(leading)}, or 1 in their "
            f"place, got shape {tuple(indices.shape)}"
        )
    is_integer = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
    if indices.numel() and not is_integer:  # torch.tensor([]) is a float
        raise ValueError(f"Expected {name} to be of an integer type, got dtype {indices.dtype}")
