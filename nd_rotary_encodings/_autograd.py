"""Derivatives of the rotations: one set of formulas behind eager mode, ``torch.compile`` and direct op calls.

A rotation is orthogonal, so its backward needs the output ``y``, which attention keeps anyway, and never the
input: with ``g = dL/dy``, ``dL/dx`` is the inverse rotation of ``g`` and ``dL/dangle = g1 y0 - g0 y1``.
"""

import torch
from torch import Tensor

from . import _ops
from .reference import pair_channels


def _axis_sums(
    angle_grad: Tensor, positions: Tensor, freqs: Tensor, needs
) -> tuple[Tensor | None, Tensor | None]:
    """From ``angle_grad`` ``[..., H, F]`` the gradients of ``positions`` ``[..., P]`` and ``freqs`` ``[P, H |
    1, F]``."""
    grad_positions = grad_freqs = None
    if needs[0]:
        sums = [(angle_grad * f).sum((-2, -1)) for f in freqs.to(angle_grad.dtype).unbind(0)]
        grad_positions = torch.stack(sums, dim=-1).sum_to_size(positions.shape).to(positions.dtype)
    if needs[1]:
        sums = [
            (angle_grad * p[..., None, None]).sum_to_size(freqs.shape[1:])
            for p in positions.to(angle_grad.dtype).unbind(-1)
        ]
        grad_freqs = torch.stack(sums).to(freqs.dtype)
    return grad_positions, grad_freqs


def gradients_by_definition(
    grad: Tensor, y: Tensor, positions: Tensor, freqs: Tensor, settings, needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward of the rotation in differentiable steps, for double backward and devices without a
    kernel."""
    from . import functional

    heads, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse = settings
    grad_x = None
    if needs[0]:
        grad_x = functional.rotate_any(grad, positions, freqs, (*settings[:-1], not inverse))
    if not (needs[1] or needs[2]):
        return grad_x, None, None
    if heads:
        grad, y = grad.unflatten(-1, (heads, -1)), y.unflatten(-1, (heads, -1))
    if head_dim_first:
        grad, y = grad.transpose(-3, -2), y.transpose(-3, -2)
    if num_prefix_tokens:
        grad, y = grad[..., num_prefix_tokens:, :, :], y[..., num_prefix_tokens:, :, :]
    dtype = torch.promote_types(y.dtype, torch.float32)
    g0, g1 = pair_channels(grad.to(dtype), freqs.shape[-1], block, rotary_offset)
    y0, y1 = pair_channels(y.to(dtype), freqs.shape[-1], block, rotary_offset)
    angle_grad = g1 * y0 - g0 * y1
    return grad_x, *_axis_sums(-angle_grad if inverse else angle_grad, positions, freqs, needs[1:])


def _sum_to(shape: torch.Size, grad: Tensor, settings) -> Tensor:
    """The sum over broadcast dims; after prefix tokens, one token alone may have been broadcast, too."""
    heads, _, _, prefix, head_dim_first, _ = settings
    token_dim = -2 if heads or head_dim_first else -3
    if prefix and grad.shape[token_dim] != shape[token_dim]:
        rest = grad.narrow(token_dim, prefix, grad.shape[token_dim] - prefix).sum(token_dim, keepdim=True)
        grad = torch.cat((grad.narrow(token_dim, 0, prefix), rest), dim=token_dim)
    return grad.sum_to_size(shape)


def gradients(
    grad: Tensor, y: Tensor | None, positions: Tensor, freqs: Tensor, settings, needs, x_shape
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(dL/dx, dL/dpositions, dL/dfreqs)``, None where not needed. ``y`` is only read for the latter two."""
    if y is None:
        y = grad
    if torch.is_grad_enabled():
        results = gradients_by_definition(grad, y, positions, freqs, settings, needs)
    elif needs[1] or needs[2]:
        results = _ops.rotate_backward(grad, y, positions, freqs, *settings, *needs)
        results = tuple(r if need else None for r, need in zip(results, needs, strict=True))
    else:
        results = (_ops.rotate(grad, positions, freqs, *settings[:-1], not settings[-1]), None, None)
    grad_x = results[0]
    if grad_x is not None and grad_x.shape != x_shape:
        grad_x = _sum_to(x_shape, grad_x, settings)
    return grad_x, results[1], results[2]


class Rotate(torch.autograd.Function):
    """Eager training. One method for forward and context: with a separate ``setup_context``, ``apply`` is 5
    times as dear."""

    @staticmethod
    def forward(ctx, x, positions, freqs, settings, in_place):
        if in_place:
            _ops.rotate_(x, positions, freqs, *settings)
            ctx.mark_dirty(x)
            y = x
        else:
            y = _ops.rotate(x, positions, freqs, *settings)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(y if needs[1] or needs[2] else None, positions, freqs)
        ctx.settings, ctx.x_shape = settings, x.shape
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None, None
        y, positions, freqs = ctx.saved_tensors
        return (
            *gradients(grad, y, positions, freqs, ctx.settings, ctx.needs_input_grad[:3], ctx.x_shape),
            None,
            None,
        )


def _apply_rope_setup(ctx, inputs, output):
    x, positions, freqs, *settings = inputs
    needs = ctx.needs_input_grad
    ctx.save_for_backward(output if needs[1] or needs[2] else None, positions, freqs)
    ctx.settings, ctx.x_shape = tuple(settings), x.shape


def _apply_rope_backward(ctx, grad):
    y, positions, freqs = ctx.saved_tensors
    results = gradients(grad, y, positions, freqs, ctx.settings, ctx.needs_input_grad[:3], ctx.x_shape)
    return *results, *[None] * len(ctx.settings)


torch.library.register_autograd(
    "nd_rotary::apply_rope", _apply_rope_backward, setup_context=_apply_rope_setup, lib=_ops._library
)


def angle_gradients_by_definition(
    grad: Tensor, x: Tensor, angles: Tensor, needs
) -> tuple[Tensor | None, Tensor | None]:
    """The backward of the rotation by given angles in differentiable steps."""
    grad_x = torch.ops.nd_rotary.rotate_embeddings(grad, -angles)
    grad_angles = None
    if needs[1]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x0, x1 = pair_channels(x.to(dtype), angles.shape[-1], 2, 0)
        g0, g1 = pair_channels(grad_x.to(dtype), angles.shape[-1], 2, 0)
        grad_angles = (x0 * g1 - x1 * g0).sum_to_size(angles.shape).to(angles.dtype)
    return grad_x if needs[0] else None, grad_angles


def _rotate_embeddings_setup(ctx, inputs, output):
    x, angles = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, angles)
    ctx.x_shape = x.shape


def _rotate_embeddings_backward(ctx, grad):
    x, angles = ctx.saved_tensors
    needs = ctx.needs_input_grad
    x_full = grad if x is None else x.expand(grad.shape)
    # a rule for sharding can't tell what an operator without integers is asked for
    if torch.is_grad_enabled() or _ops.is_distributed(grad, x_full, angles):
        grad_x, grad_angles = angle_gradients_by_definition(grad, x_full, angles, needs)
    else:
        results = _ops.rotate_by_angles_backward(grad, x_full, angles, *needs)
        grad_x, grad_angles = (r if need else None for r, need in zip(results, needs, strict=True))
    return grad_x if grad_x is None else grad_x.sum_to_size(ctx.x_shape), grad_angles


torch.library.register_autograd(
    "nd_rotary::rotate_embeddings",
    _rotate_embeddings_backward,
    setup_context=_rotate_embeddings_setup,
    lib=_ops._library,
)


def _calculate_rope_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _calculate_rope_backward(ctx, grad):
    from .angles import calculate_rope_backward

    positions, freqs = ctx.saved_tensors
    return calculate_rope_backward(grad, positions, freqs, *ctx.needs_input_grad)


torch.library.register_autograd(
    "nd_rotary::calculate_rope",
    _calculate_rope_backward,
    setup_context=_calculate_rope_setup,
    lib=_ops._library,
)
