"""Angles on their own, and rotations by given angles: functions that TorchScript can compile, too."""

import torch
from torch import Tensor

from . import _autograd, _ops  # noqa: F401  (_autograd registers derivatives)
from ._routes import is_transformed, needs_definition
from .reference import sum_over_axes_backward


def _check_real_strided(tensor: Tensor, name: str) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"Expected {name} to be strided, got {tensor.layout}")
    if tensor.is_complex():
        raise ValueError(f"Expected {name} to be real, got dtype {tensor.dtype}")


def _is_float(tensor: Tensor) -> bool:
    d = tensor.dtype
    return d == torch.float32 or d == torch.float64 or d == torch.float16 or d == torch.bfloat16


def _check_float(tensor: Tensor, name: str) -> None:
    _check_real_strided(tensor, name)
    if not _is_float(tensor):
        raise ValueError(
            f"Expected {name} to be float16, bfloat16, float32 or float64, got dtype {tensor.dtype}"
        )


def _check_dims(tensor: Tensor, name: str, dims: int) -> None:
    if tensor.ndim < dims:
        raise ValueError(f"Expected at least {dims} dimensions for {name}, got shape {tensor.shape}")


def _check_device(tensor: Tensor, name: str, other: Tensor, other_name: str) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"Expected {name} and {other_name} to be on one device, got {tensor.device} and {other.device}"
        )


def _check_freqs(positions: Tensor, rope_freqs: Tensor) -> None:
    _check_dims(positions, "positions", 2)
    if rope_freqs.ndim != 4:
        raise ValueError(f"Expected 4 dimensions for rope_freqs, got shape {rope_freqs.shape}")
    if positions.size(-1) != rope_freqs.size(0):
        raise ValueError(
            "Expected first dimension of `rope_freqs` and last dimension of positions to match, got "
            f"{rope_freqs.size(0)} and {positions.size(-1)}"
        )
    if rope_freqs.size(0) == 0:
        raise ValueError(f"Expected at least 1 position axis, got rope_freqs of shape {rope_freqs.shape}")
    _check_real_strided(positions, "positions")
    if positions.dtype == torch.bool:
        raise ValueError(f"Expected positions to be integers or floating point, got dtype {positions.dtype}")
    if positions.is_floating_point():
        _check_float(positions, "positions")
    _check_float(rope_freqs, "rope_freqs")
    _check_device(positions, "positions", rope_freqs, "rope_freqs")


def _check_angles(embeddings: Tensor, rope_encoding: Tensor) -> None:
    _check_real_strided(embeddings, "embeddings")
    _check_real_strided(rope_encoding, "rope_encoding")
    if not (_is_float(embeddings) and _is_float(rope_encoding)):
        raise ValueError(
            "Expected embeddings and rope_encoding to be floating point, got "
            f"{embeddings.dtype} and {rope_encoding.dtype}: float16, bfloat16, float32 or float64"
        )
    _check_device(embeddings, "embeddings", rope_encoding, "rope_encoding")
    if embeddings.ndim != rope_encoding.ndim:
        raise ValueError(
            "Expected embeddings and rope_encoding to have the same number of dims, got shapes "
            f"{embeddings.shape} and {rope_encoding.shape}"
        )
    _check_dims(embeddings, "embeddings", 3)
    sizes, angle_sizes = embeddings.shape, rope_encoding.shape
    if sizes[-1] != angle_sizes[-1] * 2:
        raise ValueError(
            "Expected rope_encoding to have last dimension equal to 1/2 embedding's head dim, got "
            f"{angle_sizes[-1]} and {sizes[-1]}"
        )
    for d in range(len(sizes) - 1):
        a, b = sizes[d], angle_sizes[d]
        if a != b and b != 1 and (a != 1 or d == len(sizes) - 2):
            raise RuntimeError(
                f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton "
                f"dimension {d}"
            )


def _rotate(embeddings: Tensor, rope_encoding: Tensor) -> Tensor:
    if not torch.jit.is_scripting():  # noqa: SIM102  (TorchScript leaves out this block, not half a condition)
        if is_transformed() or needs_definition(embeddings, rope_encoding):
            return _ops.rotate_by_angles_definition(embeddings, rope_encoding)
    return torch.ops.nd_rotary.rotate_embeddings(embeddings, rope_encoding)


def calculate_rope(positions: Tensor, rope_freqs: Tensor) -> Tensor:
    """The angles of all pairs, summed over axes and frequency groups.

    Args:
        positions: ``[..., P]``, any real dtype.
        rope_freqs: ``[P, G, H, F]``, zero where a group lacks an axis.

    Returns:
        Angles in radians ``[..., H, F]``, contiguous, in the dtype of ``rope_freqs`` and rounded to it once.

    Raises:
        ValueError: if dims or the number of axes don't fit.
    """
    _check_freqs(positions, rope_freqs)
    if not torch.jit.is_scripting():  # noqa: SIM102  (TorchScript leaves out this block, not half a condition)
        if is_transformed() or needs_definition(positions, rope_freqs):
            return _ops.calculate_angles_definition(positions, rope_freqs)
    return torch.ops.nd_rotary.calculate_rope(positions, rope_freqs)


def calculate_rope_backward(
    grad_rope_encoding: Tensor,
    positions: Tensor,
    rope_freqs: Tensor,
    needs_grad_positions: bool,
    needs_grad_rope_freqs: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of :func:`calculate_rope`.

    Args:
        grad_rope_encoding: ``[..., H, F]``.
        positions: ``[..., P]``.
        rope_freqs: ``[P, G, H, F]``.
        needs_grad_positions, needs_grad_rope_freqs: which gradients to form.

    Returns:
        Gradients of the shapes and dtypes of ``positions`` and ``rope_freqs``, None where not needed.

    Raises:
        ValueError: if dims or the number of axes don't fit.
    """
    _check_freqs(positions, rope_freqs)
    _check_dims(grad_rope_encoding, "grad_rope_encoding", 3)
    _check_float(grad_rope_encoding, "grad_rope_encoding")
    _check_device(grad_rope_encoding, "grad_rope_encoding", positions, "positions")
    heads, pairs = rope_freqs.size(2), rope_freqs.size(3)
    if grad_rope_encoding.size(-1) != pairs or (heads != 1 and grad_rope_encoding.size(-2) != heads):
        raise ValueError(
            "Expected grad_rope_encoding to have the heads and pairs of rope_freqs, got shapes "
            f"{grad_rope_encoding.shape} and {rope_freqs.shape}"
        )
    dtype = torch.promote_types(
        torch.promote_types(grad_rope_encoding.dtype, rope_freqs.dtype), torch.float32
    )
    if positions.is_floating_point():
        dtype = torch.promote_types(dtype, positions.dtype)
    grad_positions, grad_freqs = sum_over_axes_backward(
        grad_rope_encoding.to(dtype),
        positions,
        rope_freqs.to(dtype).sum(1),
        needs_grad_positions,
        needs_grad_rope_freqs,
    )
    if grad_freqs is not None:  # the same for all groups, which are summed
        groups = grad_freqs.unsqueeze(1).expand(-1, rope_freqs.size(1), -1, -1)
        grad_freqs = groups.to(rope_freqs.dtype).contiguous()
    return grad_positions, grad_freqs


def rotate_embeddings(embeddings: Tensor, rope_encoding: Tensor, needs_autograd: bool = True) -> Tensor:
    """Rotates interleaved pairs of channels by given angles.

    Args:
        embeddings: ``[..., H, D]``, float16, bfloat16, float32 or float64.
        rope_encoding: angles in radians ``[..., H or 1, D / 2]``, with as many dims; leading dims broadcast.
        needs_autograd: False writes the result into ``embeddings``, as an in-place operation of PyTorch.

    Returns:
        The rotated embeddings in their own dtype, contiguous; with ``needs_autograd=False`` ``embeddings``
        itself.

    Raises:
        ValueError: if dims, head dim or dtypes don't fit.
        RuntimeError: if shapes don't broadcast; in place, if ``embeddings`` is a leaf that requires grad.
    """
    _check_angles(embeddings, rope_encoding)
    if needs_autograd:
        return _rotate(embeddings, rope_encoding)
    recorded = torch.is_grad_enabled() and (embeddings.requires_grad or rope_encoding.requires_grad)
    if recorded and embeddings.requires_grad and embeddings.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if not torch.jit.is_scripting():
        # the operator that writes has no derivative, and decompositions() reaches functional operators only
        recorded = recorded or is_transformed() or torch.compiler.is_exporting()
    if recorded:
        # the gradient of the angles needs the values that are overwritten
        values = embeddings.clone() if rope_encoding.requires_grad else embeddings
        return embeddings.copy_(_rotate(values, rope_encoding))
    torch.ops.nd_rotary._rotate_by_angles_(embeddings, rope_encoding)
    if not torch.jit.is_scripting():
        torch.autograd.graph.increment_version(embeddings)
    return embeddings


def rotate_embeddings_backward(
    grad_embeddings_rotated: Tensor,
    embeddings: Tensor,
    rope_encoding: Tensor,
    needs_grad_embeddings: bool = True,
    needs_grad_rope_encoding: bool = True,
    needs_autograd: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of :func:`rotate_embeddings`.

    Args:
        grad_embeddings_rotated: ``[..., H, D]``.
        embeddings: the input of the forward, ``[..., H, D]``.
        rope_encoding: ``[..., H or 1, D / 2]``.
        needs_grad_embeddings, needs_grad_rope_encoding: which gradients to form.
        needs_autograd: whether the gradients must be differentiable in turn.

    Returns:
        Gradients of the shapes and dtypes of ``embeddings`` and ``rope_encoding``, contiguous; None where not
        needed.

    Raises:
        ValueError: if dims, shapes or dtypes don't fit.
    """
    _check_float(grad_embeddings_rotated, "grad_embeddings_rotated")
    if grad_embeddings_rotated.shape != embeddings.shape:
        raise ValueError(
            "Expected grad_embeddings_rotated and embeddings to have the same shape, got "
            f"{grad_embeddings_rotated.shape} and {embeddings.shape}"
        )
    _check_angles(embeddings, rope_encoding)
    _check_device(grad_embeddings_rotated, "grad_embeddings_rotated", embeddings, "embeddings")
    grad = grad_embeddings_rotated.to(embeddings.dtype)
    grad_embeddings: Tensor | None = None
    grad_rope_encoding: Tensor | None = None
    if not needs_grad_embeddings and not needs_grad_rope_encoding:
        return grad_embeddings, grad_rope_encoding
    if not needs_autograd and not torch.jit.is_scripting():
        needs_autograd = is_transformed()
    if needs_autograd:
        rotated = _rotate(grad, -rope_encoding)
        if needs_grad_rope_encoding:
            dtype = torch.promote_types(embeddings.dtype, torch.float32)
            x, g = embeddings.to(dtype), rotated.to(dtype)
            products = x[..., 0::2] * g[..., 1::2] - x[..., 1::2] * g[..., 0::2]
            grad_rope_encoding = (
                products.sum_to_size(rope_encoding.shape).to(rope_encoding.dtype).contiguous()
            )
        if needs_grad_embeddings:
            grad_embeddings = rotated
        return grad_embeddings, grad_rope_encoding
    results = torch.ops.nd_rotary._rotate_by_angles_backward(
        grad, embeddings, rope_encoding, needs_grad_embeddings, needs_grad_rope_encoding
    )
    if needs_grad_embeddings:
        grad_embeddings = results[0]
    if needs_grad_rope_encoding:
        grad_rope_encoding = results[1]
    return grad_embeddings, grad_rope_encoding
