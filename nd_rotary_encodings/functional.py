"""Rotary embeddings as functions: by positions and frequencies here, by given angles in angles.py."""

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from . import _autograd, _ops, reference
from ._checks import check_apply_rope, check_in_place, check_not_leaf
from .angles import calculate_rope, calculate_rope_backward, rotate_embeddings, rotate_embeddings_backward

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
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and type(x) in _PLAIN_TYPES
        and type(positions) in _PLAIN_TYPES
        and type(freqs) in _PLAIN_TYPES
    )


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
    if _ops.is_distributed(x, positions, freqs):
        from ._sharding import distribute

        x, positions, freqs = distribute(x, positions, freqs)
        if settings[0]:  # heads may be sharded, too: each process has some of them
            x = x.unflatten(-1, (settings[0], -1))
            return rotate_any(x, positions, freqs, (0, *settings[1:])).flatten(-2)
    if _ops.needs_definition(x, positions, freqs):
        return reference.apply_rope(x, positions, freqs, *settings)
    return _ops.apply_rope(x, positions, freqs, *settings)


def rotate_any_(x: Tensor, positions: Tensor, freqs: Tensor, settings: tuple) -> Tensor:
    """``apply_rope_`` after its checks."""
    if _ops.is_distributed(x, positions, freqs):
        return x.copy_(rotate_any(x, positions, freqs, settings))
    if _ops.needs_definition(x, positions, freqs):
        # of a clone, as the definition's backward needs the values that are overwritten
        return x.copy_(reference.apply_rope(x.clone(), positions, freqs, *settings))
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
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

    If ``x`` is a DTensor, each process rotates its part: batch, heads and tokens (without a prefix) stay
    sharded. Plain ``positions`` and ``freqs`` beside it must be the same on all processes, and get the whole
    gradient.

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
        ValueError: if shapes, dtypes, devices or settings don't fit; if ``positions`` or ``freqs`` is a
            DTensor and ``x`` is none.
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
    check_not_leaf(qkv)
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
