"""How the operators act on ``DTensor``: which dims may be sharded, so that each process rotates what it has.

Importing this registers the rules. ``_routes.is_distributed`` does so where DTensors are in use already, as
importing ``torch.distributed.tensor`` takes half a second.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


def distribute(x: Tensor, positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All as DTensors. Plain ``positions`` and ``freqs`` are taken to be the same on all processes, and get
    the gradient of the whole.

    Raises:
        ValueError: if ``x`` is plain, as nothing says which part of the whole it is.
    """
    if not isinstance(x, DTensor):
        raise ValueError(
            "Expected x (query or key) to be a DTensor where positions or freqs are, got a plain tensor: "
            "DTensor.from_local says what it is a part of"
        )
    mesh = x.device_mesh
    replicated = [Replicate()] * mesh.ndim
    positions, freqs = (
        t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, replicated, run_check=False)
        for t in (positions, freqs)
    )
    return x, positions, freqs


ops = torch.ops.nd_rotary


def _full_dims(first: int, second: int) -> tuple[bool, bool]:
    """Which of two sizes that broadcast is that of the result."""
    return first != 1 or second == 1, second != 1 or first == 1


def _shared_dims(
    x_shape, position_shape, freq_shape, heads: int, num_prefix_tokens: int, head_dim_first: bool
) -> Iterator[tuple[int, int | None, int | None, int | None]]:
    """The dims along which a rotation falls into independent parts, as dims of the result, of ``x``, of
    ``positions`` and of ``freqs``; None where a tensor is the same for all parts."""

    def leading(ndim: int) -> list[int]:
        return [*range(ndim - 3), ndim - 2] if head_dim_first else list(range(ndim - (1 if heads else 2)))

    x_dims, position_dims = leading(len(x_shape)), list(range(len(position_shape) - 1))
    count = max(len(x_dims), len(position_dims))
    result_ndim = len(x_shape) + count - len(x_dims)
    for i in range(1, count + 1):
        if i == 1 and num_prefix_tokens:
            continue  # token n of x has position n - num_prefix_tokens
        x_dim = x_dims[-i] if i <= len(x_dims) else None
        position_dim = position_dims[-i] if i <= len(position_dims) else None
        x_full, position_full = _full_dims(
            1 if x_dim is None else x_shape[x_dim],
            1 if position_dim is None else position_shape[position_dim],
        )
        yield (
            leading(result_ndim)[-i],
            x_dim if x_full else None,
            position_dim if position_full else None,
            None,
        )
    if not heads:
        dim = -3 if head_dim_first else -2
        yield result_ndim + dim, len(x_shape) + dim, None, 1 if freq_shape[1] != 1 else None


def _shard(dim: int | None):
    return Replicate() if dim is None else Shard(dim)


def _summed(dim: int | None):
    return Partial() if dim is None else Shard(dim)


@register_sharding([ops._rotate.default, ops.apply_rope.default])
def _rotate(x, positions, freqs, heads=0, block=2, offset=0, prefix=0, head_dim_first=False, inverse=False):
    settings = [None] * 6
    rules = [([_shard(None)], [_shard(None)] * 3 + settings)]
    for y, *inputs in _shared_dims(x.shape, positions.shape, freqs.shape, heads, prefix, head_dim_first):
        rules.append(([_shard(y)], [_shard(dim) for dim in inputs] + settings))
    return rules


@register_sharding(ops._rotate_backward.default)
def _rotate_backward(
    grad, y, positions, freqs, heads, block, offset, prefix, head_dim_first, inverse, *needs
):
    settings = [None] * 9
    rules = [([_shard(None)] * 3, [_shard(None)] * 4 + settings)]
    for _, *dims in _shared_dims(y.shape, positions.shape, freqs.shape, heads, prefix, head_dim_first):
        outputs = [_summed(dim) if need else Replicate() for dim, need in zip(dims, needs, strict=True)]
        rules.append((outputs, [_shard(dim) for dim in (dims[0], *dims)] + settings))
    return rules


@register_sharding([ops._rotate_by_angles.default, ops.rotate_embeddings.default])
def _rotate_by_angles(x, angles):
    rules = [([_shard(None)], [_shard(None)] * 2)]
    for dim in range(x.ndim - 1):
        full = _full_dims(x.shape[dim], angles.shape[dim])
        rules.append(([_shard(dim)], [_shard(dim if f else None) for f in full]))
    return rules


@register_sharding([ops._calculate_angles.default, ops.calculate_rope.default])
def _calculate_angles(positions, freqs):
    rules = [([_shard(None)], [_shard(None)] * 2)]
    rules += [([_shard(dim)], [_shard(dim), _shard(None)]) for dim in range(positions.ndim - 1)]
    return [*rules, ([_shard(positions.ndim - 1)], [_shard(None), _shard(2)])]
