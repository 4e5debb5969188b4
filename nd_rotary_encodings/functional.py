"""Rotary position embeddings as functions: by positions and frequencies, or by given angles."""

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C, _autograd, _ops, reference  # noqa: F401  (_C registers the kernels)
from ._checks import check_apply_rope, check_in_place

__all__ = [
    "apply_rope",
    "apply_rope_",
    "apply_rope_qkv_",
    "calculate_rope",
    "calculate_rope_backward",
    "rotate_embeddings",
    "rotate_embeddings_backward",
]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(x: Tensor, positions: Tensor, freqs: Tensor) -> bool:
    """Whether this is eager code on plain tensors: no tracing, no torch.func transform, no dual or wrapped
    tensor.

    Asking for ``requires_grad`` alone would send a dual tensor to an operator that drops its tangent.
    """
    return (
        not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and type(x) in _PLAIN_TYPES
        and type(positions) in _PLAIN_TYPES
        and type(freqs) in _PLAIN_TYPES
    )


def _needs_definition(x: Tensor, positions: Tensor, freqs: Tensor) -> bool:
    """Whether the operators can't be used: under transforms, for dual tensors, and for wrapper subclasses,
    whose rules for PyTorch's own operators are what makes them work."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        return True
    return any(is_traceable_wrapper_subclass(t) for t in (x, positions, freqs))


def _records(x: Tensor, positions: Tensor, freqs: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or positions.requires_grad or freqs.requires_grad)


def rotate_plain(x: Tensor, positions: Tensor, freqs: Tensor, settings: tuple) -> Tensor:
    """``apply_rope`` where :func:`is_plain`. Unchecked: errors are RuntimeErrors of the kernel."""
    if _records(x, positions, freqs):
        return _autograd.Rotate.apply(x, positions, freqs, settings, False)
    if settings == _ops.DEFAULT_SETTINGS:
        return _ops.rotate(x, positions, freqs)
    if settings[1:] == _ops.DEFAULT_SETTINGS[1:]:
        return _ops.rotate(x, positions, freqs, settings[0])
    return _ops.rotate(x, positions, freqs, *settings)


def rotate_any(x: Tensor, positions: Tensor, freqs: Tensor, settings: tuple) -> Tensor:
    """``apply_rope`` after its checks."""
    if is_plain(x, positions, freqs):
        return rotate_plain(x, positions, freqs, settings)
    if _needs_definition(x, positions, freqs):
        return reference.apply_rope(x, positions, freqs, *settings)
    return _ops.apply_rope(x, positions, freqs, *settings)


def rotate_any_(x: Tensor, positions: Tensor, freqs: Tensor, settings: tuple) -> Tensor:
    """``apply_rope_`` after its checks."""
    if _needs_definition(x, positions, freqs):
        return x.copy_(reference.apply_rope(x, positions, freqs, *settings))
    if torch.compiler.is_compiling():
        if _records(x, positions, freqs):
            return x.copy_(_ops.apply_rope(x, positions, freqs, *settings))
        torch.ops.nd_rotary._rotate_(x, positions, freqs, *settings)
        return x
    if _records(x, positions, freqs):
        return _autograd.Rotate.apply(x, positions, freqs, settings, True)
    _ops.rotate_(x, positions, freqs, *settings)
    torch.autograd.graph.increment_version(x)
    return x


def apply_rope(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Rotates the channels of ``x`` by the angles ``sum_a positions[..., a] * freqs[a]``.

    With ``c`` and ``s`` the cosine and sine of the angle of a pair of channels ``(x0, x1)``, the result is
    ``(x0 c - x1 s, x1 c + x0 s)`` (Su et al., RoFormer, arXiv:2104.09864; with several axes and frequencies
    per head Heo et al., RoPE-Mixed, arXiv:2403.13298). Angles are formed in at least float32 accuracy
    including range reduction, whatever autocast says, and are never stored. Differentiable in ``x``,
    ``positions`` and ``freqs``.

    Args:
        x: ``[..., N, H, D]``, or ``[..., H, N, D]`` with ``head_dim_first``; float16, bfloat16, float32 or
            float64, any strides.
        positions: ``[..., N, P]``, any real dtype; float positions in the unit that ``freqs`` is for (radians
            per unit). Leading dims broadcast against those of ``x``, both ways.
        freqs: ``[P, H, F]``, or ``[P, 1, F]`` for all heads alike, with ``2 * F <= D``; floating point.
        layout: which channels make a pair, counted from ``rotary_offset``: ``"interleaved"`` (2i, 2i + 1),
            ``"half"`` (i, i + F), or a number b: half-split inside consecutive blocks of b channels.
        rotary_offset: the first rotated channel of each head. Channels outside ``[rotary_offset,
            rotary_offset + 2F)`` are copied.
        num_prefix_tokens: the first tokens (class token, registers), which are copied; ``positions`` are
            those of the other tokens.
        head_dim_first: heads come before tokens in ``x``.
        inverse: rotates by the negative angles.

    Returns:
        A new tensor of the dtype of ``x`` and its shape, with leading dims broadcast. It has the strides of
        ``x`` where those are dense, else it is contiguous.

    Raises:
        ValueError: if shapes, dtypes, devices or settings don't fit.
    """
    if layout == "interleaved" and is_plain(x, positions, freqs):
        # the kernel checks all that the Python code does, and faster; only the words are worse
        try:
            return rotate_plain(
                x, positions, freqs, (0, 2, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
            )
        except (RuntimeError, TypeError):
            check_apply_rope(x, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first)
            raise
    block = check_apply_rope(x, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first)
    return rotate_any(
        x, positions, freqs, (0, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
    )


def apply_rope_(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """:func:`apply_rope` written into ``x``, which is returned. Differentiable; needs the full shape in
    ``x``.

    Raises:
        ValueError: as :func:`apply_rope`, and if ``x`` would have to be broadcast or its elements share
            memory.
        RuntimeError: if ``x`` is a leaf that requires grad, as for any in-place operation of PyTorch.
    """
    block = check_apply_rope(x, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first)
    lead = [*x.shape[:-3], x.shape[-2]] if head_dim_first else list(x.shape[:-2])
    if num_prefix_tokens:
        lead[-1] -= num_prefix_tokens
    check_in_place(x, lead, positions.shape[:-1], "x", "positions")
    return rotate_any_(
        x, positions, freqs, (0, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
    )


def apply_rope_qkv_(
    qkv: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Rotates queries and keys inside a packed projection, in place, and leaves the values alone.

    Nothing is copied and nothing but ``qkv`` itself is kept for the backward.

    Args:
        qkv: ``[..., N, 3, H, D]``, or ``[..., 3, H, N, D]`` with ``head_dim_first``: a projection's output,
            reshaped.
        positions: ``[..., N, P]``.
        freqs: ``[P, H or 1, F]``.
        layout, rotary_offset, num_prefix_tokens, head_dim_first, inverse: as in :func:`apply_rope`.

    Returns:
        ``qkv``.

    Raises:
        ValueError: as :func:`apply_rope_`.
        RuntimeError: if ``qkv`` is a leaf that requires grad.
    """
    at = -4 if head_dim_first else -3
    if qkv.ndim < 4 or qkv.shape[at] != 3:
        wanted = "[..., 3, H, N, D]" if head_dim_first else "[..., N, 3, H, D]"
        raise ValueError(f"Expected qkv to have shape {wanted}, got {tuple(qkv.shape)}")
    # queries and keys as one more leading dim, along which positions are shared
    qk = qkv.narrow(at, 0, 2) if head_dim_first else qkv.narrow(at, 0, 2).transpose(-4, -3)
    apply_rope_(
        qk,
        positions.unsqueeze(-3),
        freqs,
        layout=layout,
        rotary_offset=rotary_offset,
        num_prefix_tokens=num_prefix_tokens,
        head_dim_first=head_dim_first,
        inverse=inverse,
    )
    return qkv


def _check_real(tensor: Tensor, name: str) -> None:
    if tensor.is_complex():
        raise ValueError(f"Expected {name} to be real, got dtype {tensor.dtype}")


def _check_dims(tensor: Tensor, name: str, dims: int) -> None:
    if tensor.ndim < dims:
        raise ValueError(f"Expected at least {dims} dimensions for {name}, got shape {tensor.shape}")


def _check_freqs(positions: Tensor, rope_freqs: Tensor) -> None:
    _check_dims(positions, "positions", 2)
    if rope_freqs.ndim != 4:
        raise ValueError(f"Expected 4 dimensions for rope_freqs, got shape {rope_freqs.shape}")
    if positions.size(-1) != rope_freqs.size(0):
        raise ValueError(
            "Expected first dimension of `rope_freqs` and last dimension of positions to match, got "
            f"{rope_freqs.size(0)} and {positions.size(-1)}"
        )
    _check_real(positions, "positions")
    _check_real(rope_freqs, "rope_freqs")


def _check_angles(embeddings: Tensor, rope_encoding: Tensor) -> None:
    _check_real(embeddings, "embeddings")
    _check_real(rope_encoding, "rope_encoding")
    if embeddings.ndim != rope_encoding.ndim:
        raise ValueError(
            "Expected embeddings and rope_encoding to have the same number of dims, got shapes "
            f"{embeddings.shape} and {rope_encoding.shape}"
        )
    _check_dims(embeddings, "embeddings", 3)
    if embeddings.size(-1) != rope_encoding.size(-1) * 2:
        raise ValueError(
            "Expected rope_encoding to have last dimension equal to 1/2 embedding's head dim, got "
            f"{rope_encoding.size(-1)} and {embeddings.size(-1)}"
        )
    if not (embeddings.is_floating_point() and rope_encoding.is_floating_point()):
        raise ValueError(
            "Expected embeddings and rope_encoding to be floating point, got "
            f"{embeddings.dtype} and {rope_encoding.dtype}"
        )
    if embeddings.device != rope_encoding.device:
        raise ValueError(
            "Expected embeddings and rope_encoding to be on one device, got "
            f"{embeddings.device} and {rope_encoding.device}"
        )
    for d in range(embeddings.ndim - 1):
        a, b = embeddings.size(d), rope_encoding.size(d)
        if a != b and b != 1 and (a != 1 or d == embeddings.ndim - 2):
            raise RuntimeError(
                f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton "
                f"dimension {d}"
            )


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
    grad_positions: Tensor | None = None
    grad_rope_freqs: Tensor | None = None
    dtype = torch.promote_types(
        torch.promote_types(grad_rope_encoding.dtype, rope_freqs.dtype), torch.float32
    )
    if positions.is_floating_point():
        dtype = torch.promote_types(dtype, positions.dtype)
    heads = grad_rope_encoding.size(-2)
    grad = grad_rope_encoding.to(dtype)
    if needs_grad_positions:
        # products and sums rather than a matmul, which may run in reduced precision
        freqs = rope_freqs.to(dtype).sum(1)
        sums = [(grad * freqs[a]).sum((-2, -1)) for a in range(freqs.size(0))]
        grad_positions = torch.stack(sums, -1).sum_to_size(positions.shape).to(positions.dtype)
    if needs_grad_rope_freqs:
        flat = (
            positions.to(dtype)
            .expand(grad.shape[:-2] + (positions.size(-1),))  # noqa: RUF005  (TorchScript)
            .reshape(-1, positions.size(-1))
        )
        rows = grad.reshape(-1, heads, grad.size(-1))
        sums = [(rows * flat[:, a].unsqueeze(-1).unsqueeze(-1)).sum(0) for a in range(flat.size(1))]
        full = torch.stack(sums).unsqueeze(1).expand(-1, rope_freqs.size(1), -1, -1)
        grad_rope_freqs = full.sum_to_size(rope_freqs.shape).to(rope_freqs.dtype)
    return grad_positions, grad_rope_freqs


def rotate_embeddings(embeddings: Tensor, rope_encoding: Tensor, needs_autograd: bool = True) -> Tensor:
    """Rotates interleaved pairs of channels by given angles.

    Args:
        embeddings: ``[..., H, D]``, float16, bfloat16, float32 or float64.
        rope_encoding: angles in radians ``[..., H or 1, D / 2]``, with as many dims; leading dims broadcast.
        needs_autograd: False writes the result into ``embeddings``, without autograd.

    Returns:
        The rotated embeddings in their own dtype, contiguous; with ``needs_autograd=False`` ``embeddings``
        itself.

    Raises:
        ValueError: if dims, head dim or dtypes don't fit.
        RuntimeError: if shapes don't broadcast; in place, if ``embeddings`` is a leaf that requires grad.
    """
    _check_angles(embeddings, rope_encoding)
    if needs_autograd:
        return torch.ops.nd_rotary.rotate_embeddings(embeddings, rope_encoding)
    if torch.is_grad_enabled() and embeddings.requires_grad and embeddings.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
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
    _check_real(grad_embeddings_rotated, "grad_embeddings_rotated")
    _check_angles(embeddings, rope_encoding)
    if grad_embeddings_rotated.shape != embeddings.shape:
        raise ValueError(
            "Expected grad_embeddings_rotated and embeddings to have the same shape, got "
            f"{grad_embeddings_rotated.shape} and {embeddings.shape}"
        )
    grad = grad_embeddings_rotated.to(embeddings.dtype)
    grad_embeddings: Tensor | None = None
    grad_rope_encoding: Tensor | None = None
    if not needs_grad_embeddings and not needs_grad_rope_encoding:
        return grad_embeddings, grad_rope_encoding
    if needs_autograd:
        rotated = torch.ops.nd_rotary.rotate_embeddings(grad, -rope_encoding)
        if needs_grad_rope_encoding:
            dtype = torch.promote_types(embeddings.dtype, torch.float32)
            x, g = embeddings.to(dtype), rotated.to(dtype)
            products = x[..., 0::2] * g[..., 1::2] - x[..., 1::2] * g[..., 0::2]
            grad_rope_encoding = products.sum_to_size(rope_encoding.shape).to(rope_encoding.dtype)
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
