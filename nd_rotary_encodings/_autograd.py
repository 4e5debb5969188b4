"""Gradients of the rotations: one set of formulas behind eager mode, transforms, compilers and operators.

A rotation is orthogonal, so its backward needs the output ``y``, which attention keeps anyway, and never the
input: with ``g = dL/dy``, ``dL/dx`` is the inverse rotation of ``g`` and ``dL/dangle = g1 y0 - g0 y1``.
"""

import torch
from torch import Tensor

from . import _ops, _routes
from ._ops import inverse_of
from .reference import queries_and_keys


def _sum_to(shape: torch.Size, grad: Tensor | None, settings) -> Tensor | None:
    """The sum over broadcast dims; after prefix tokens, one token alone may have been broadcast, too."""
    if grad is None or grad.shape == shape:
        return grad
    heads, _, _, prefix, head_dim_first, _ = settings
    token_dim = -2 if heads or head_dim_first else -3
    if prefix and grad.shape[token_dim] != shape[token_dim]:
        rest = grad.narrow(token_dim, prefix, grad.shape[token_dim] - prefix).sum(token_dim, keepdim=True)
        grad = torch.cat((grad.narrow(token_dim, 0, prefix), rest), dim=token_dim)
    return grad.sum_to_size(shape)


def gradients(
    grad: Tensor, y: Tensor | None, positions: Tensor, freqs: Tensor, settings: tuple, needs, x_shape
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(dL/dx, dL/dpositions, dL/dfreqs)``, None where not needed. ``y`` is only read for the latter two."""
    if y is None:
        y = grad
    grad_x, grad_positions, grad_freqs = _routes.rotate_backward_any(
        grad, y, positions, freqs, settings, needs
    )
    return _sum_to(x_shape, grad_x, settings), grad_positions, grad_freqs


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
        needs = ctx.needs_input_grad[:3]
        return *gradients(grad, y, positions, freqs, ctx.settings, needs, ctx.x_shape), None, None


def _qk_setup(ctx, inputs, output):
    query, key, positions, freqs, *settings = inputs
    outputs = output if any(ctx.needs_input_grad[2:4]) else (None, None)
    ctx.save_for_backward(*outputs, positions, freqs)
    ctx.settings, ctx.shapes = tuple(settings), (query.shape, key.shape)
    ctx.set_materialize_grads(False)


def _qk_backward(ctx, *grads):
    *outputs, positions, freqs = ctx.saved_tensors
    settings, shapes, needs = ctx.settings, ctx.shapes, ctx.needs_input_grad[:4]
    no_settings = [None] * len(settings)
    if _routes.can_join(grads, outputs, positions, freqs):
        if outputs[0] is None:  # and not read
            outputs = grads
        each = (needs[0] or needs[1], *needs[2:])
        results = _ops.rotate_qk_backward(*grads, *outputs, positions, freqs, *settings, *each)
        results = [r if n else None for r, n in zip(results, needs, strict=True)]
        return *map(_sum_to, shapes, results, (settings, settings)), *results[2:], *no_settings
    of_x: list[Tensor | None] = [None, None]
    sums: list[Tensor | None] = [None, None]
    for i, (grad, y) in enumerate(zip(grads, outputs, strict=True)):
        if grad is not None:
            each = (needs[i], *needs[2:])
            of_x[i], *more = gradients(grad, y, positions, freqs, settings, each, shapes[i])
            sums = [b if a is None or b is None else a + b for a, b in zip(sums, more, strict=True)]
    return *of_x, *sums, *no_settings


class RotateQK(torch.autograd.Function):
    """Eager training of queries and keys by the same positions, with cosines and sines formed once."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _ops.rotate_qk(*inputs)
        _qk_setup(ctx, inputs, output)
        return output

    backward = staticmethod(_qk_backward)


class RotatePacked(torch.autograd.Function):
    """The rotation of queries and keys inside ``packed``, whose shape as a projection is ``shape``.

    A Function of all three, as that of a part would have autograd copy the whole projection and its gradient.
    """

    @staticmethod
    def forward(ctx, packed, shape, positions, freqs, settings):
        part = queries_and_keys(packed.view(shape), settings[4])
        torch.ops.nd_rotary._rotate_(part, positions, freqs, *settings)
        ctx.mark_dirty(packed)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(packed if needs[2] or needs[3] else None, positions, freqs)
        ctx.shape, ctx.settings = shape, settings
        return packed

    @staticmethod
    def backward(ctx, grad):
        packed, positions, freqs = ctx.saved_tensors
        head_dim_first, grad_packed = ctx.settings[4], grad.reshape(ctx.shape)
        grad_positions = grad_freqs = None
        if packed is not None:
            part = queries_and_keys(grad_packed, head_dim_first)
            y = queries_and_keys(packed.view(ctx.shape), head_dim_first)
            needs = (False, *ctx.needs_input_grad[2:4])
            _, grad_positions, grad_freqs = _routes.rotate_backward_any(
                part, y, positions, freqs, ctx.settings, needs
            )
        if not ctx.needs_input_grad[0]:
            return None, None, grad_positions, grad_freqs, None
        grad_packed = grad_packed.clone(memory_format=torch.contiguous_format)
        part = queries_and_keys(grad_packed, head_dim_first)
        _routes.rotate_any_(part, positions, freqs, inverse_of(ctx.settings))
        return grad_packed.view(grad.shape), None, grad_positions, grad_freqs, None


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


torch.library.register_autograd(
    "nd_rotary::apply_rope_qk", _qk_backward, setup_context=_qk_setup, lib=_ops._library
)


def _rotate_embeddings_setup(ctx, inputs, output):
    x, angles = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, angles)
    ctx.x_shape = x.shape


def _rotate_embeddings_backward(ctx, grad):
    from .angles import rotate_embeddings_backward

    x, angles = ctx.saved_tensors
    needs = ctx.needs_input_grad
    x_full = grad if x is None else x.expand(grad.shape)
    # a rule for sharding can't tell what an operator without integers is asked for
    if torch.is_grad_enabled() or _routes.is_distributed(grad, x_full, angles):
        grad_x, grad_angles = rotate_embeddings_backward(grad, x_full, angles, *needs)
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
