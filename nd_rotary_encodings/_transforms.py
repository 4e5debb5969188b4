"""The rotation and its backward under torch.func transforms, in forward mode and for higher derivatives.

With ``c`` the rate at which an angle changes, a rotated pair ``(y0, y1)`` changes by the quarter turn
``c (-y1, y0)``; all else in the derivatives are rotations and their backwards again.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _autograd, _ops, _routes
from ._ops import inverse_of
from .reference import heads_back, join_channels, rotated_pairs, sum_over_axes


def _sum(tensors: list[Tensor]) -> Tensor | None:
    return sum(tensors[1:], start=tensors[0]) if tensors else None


def _quarter_turn(
    y: Tensor,
    positions: Tensor,
    freqs: Tensor,
    position_tangent: Tensor | None,
    freq_tangent: Tensor | None,
    settings: tuple,
) -> Tensor:
    """How the rotated ``y`` changes as positions and frequencies move along tangents: ``(-y1, y0)`` times the
    rate of the angle, and zero for what isn't rotated."""
    heads, block, rotary_offset, prefix, head_dim_first, inverse = settings
    y0, y1 = rotated_pairs(y, freqs.shape[-1], settings)
    products = []
    if position_tangent is not None:
        products.append((position_tangent, freqs))
    if freq_tangent is not None:
        products.append((positions, freq_tangent))
    rate = sum(sum_over_axes(p, f, y0.dtype) for p, f in products)
    if inverse:
        rate = -rate
    turned = join_channels(-y1 * rate, y0 * rate, block).to(y.dtype)
    after = (y.shape[-1] // heads if heads else y.shape[-1]) - rotary_offset - turned.shape[-1]
    if prefix or rotary_offset or after:
        turned = torch.nn.functional.pad(turned, (rotary_offset, after, 0, 0, prefix, 0))
    return heads_back(turned, heads, head_dim_first)


def _batch_first(x: Tensor, batch_dim: int | None, ndim: int) -> Tensor:
    """``x`` with its batch dim, if it has one, in front of ``ndim`` others."""
    if batch_dim is None:
        return x
    x = x.movedim(batch_dim, 0)
    return x[(slice(None), *[None] * (ndim + 1 - x.ndim))]


def _each(function, batch_size: int, in_dims, tensors) -> tuple[Tensor, ...]:
    """The results of ``function`` for each entry of a batch, stacked. For what operators cannot do at once:
    frequencies that differ, and sums within entries."""
    if batch_size == 0:  # the shapes of the results are those for any entry
        tensors = [
            t if d is None else t.new_zeros(1, *t.movedim(d, 0).shape[1:])
            for t, d in zip(tensors, in_dims, strict=False)
        ]
        in_dims = [d if d is None else 0 for d in in_dims]
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=False)))
        for i in range(max(batch_size, 1))
    ]
    return tuple(torch.stack(column)[:batch_size] for column in zip(*results, strict=True))


def _in_forward_mode(jvp):
    """``jvp(ctx, saved, *tangents)`` as a jvp of a Function, which PyTorch calls with forward mode off at all
    levels: tangents of outer ones would be lost, and second derivatives silently wrong."""

    def with_forward_mode(ctx, *tangents):
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]  # no tangents of this level
            return jvp(ctx, saved, *tangents)

    return with_forward_mode


class RotateTransformed(torch.autograd.Function):
    """The rotation under torch.func transforms and in forward mode, nested in any way."""

    @staticmethod
    def forward(x, positions, freqs, settings):
        return _ops.rotate(x, positions, freqs, *settings)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, positions, freqs, ctx.settings = inputs
        ctx.save_for_backward(output, positions, freqs)
        ctx.save_for_forward(output, positions, freqs)
        ctx.x_shape = x.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None
        y, positions, freqs = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return *_autograd.gradients(grad, y, positions, freqs, ctx.settings, needs, ctx.x_shape), None

    @staticmethod
    @_in_forward_mode
    def jvp(ctx, saved, x_tangent, position_tangent, freq_tangent, _):
        y, positions, freqs = saved
        tangents = []
        if x_tangent is not None:
            tangents.append(_routes.rotate_any(x_tangent, positions, freqs, ctx.settings))
        if position_tangent is not None or freq_tangent is not None:
            tangents.append(_quarter_turn(y, positions, freqs, position_tangent, freq_tangent, ctx.settings))
        return _sum(tangents)

    @staticmethod
    def vmap(info, in_dims, x, positions, freqs, settings):
        x_dim, position_dim, freq_dim = in_dims[:3]
        if freq_dim is not None:
            (rotated,) = _each(
                lambda x, positions, freqs: (_routes.rotate_any(x, positions, freqs, settings),),
                info.batch_size,
                in_dims,
                (x, positions, freqs),
            )
            return rotated, 0
        inner = 1 if settings[0] else 2
        lead = max(x.ndim - (x_dim is not None) - inner, positions.ndim - (position_dim is not None) - 1)
        x = _batch_first(x, x_dim, lead + inner)
        positions = _batch_first(positions, position_dim, lead + 1)
        return _routes.rotate_any(x, positions, freqs, settings), 0


class RotateBackward(torch.autograd.Function):
    """The backward of the rotation where it must be differentiable in turn."""

    @staticmethod
    def forward(grad, y, positions, freqs, settings, needs):
        return _ops.rotate_backward(grad, y, positions, freqs, *settings, *needs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, y, positions, freqs, ctx.settings, ctx.needs = inputs
        ctx.save_for_backward(grad, y, positions, freqs, output[0])
        ctx.save_for_forward(grad, y, positions, freqs, output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, of_x, of_positions, of_freqs):
        grad, y, positions, freqs, grad_x = ctx.saved_tensors
        settings, backward = ctx.settings, _routes.rotate_backward_any
        need_grad, need_y, need_positions, need_freqs = ctx.needs_input_grad[:4]
        sums = [[], [], [], []]
        if of_x is not None:
            needs = (need_grad, need_positions, need_freqs)
            results = backward(of_x, grad_x, positions, freqs, inverse_of(settings), needs)
            for i, result in zip((0, 2, 3), results, strict=True):
                sums[i].append(result)
        if of_positions is not None or of_freqs is not None:
            if need_grad:
                sums[0].append(_quarter_turn(y, positions, freqs, of_positions, of_freqs, settings))
            if need_y:
                sums[1].append(-_quarter_turn(grad, positions, freqs, of_positions, of_freqs, settings))
        if of_freqs is not None and need_positions:
            sums[2].append(backward(grad, y, positions, of_freqs, settings, (False, True, False))[1])
        if of_positions is not None and need_freqs:
            sums[3].append(backward(grad, y, of_positions, freqs, settings, (False, False, True))[2])
        return *[_sum([t for t in terms if t is not None]) for terms in sums], None, None

    @staticmethod
    @_in_forward_mode
    def jvp(ctx, saved, grad_tangent, y_tangent, position_tangent, freq_tangent, *_):
        grad, y, positions, freqs, grad_x = saved
        settings, backward = ctx.settings, _routes.rotate_backward_any
        need_x, need_positions, need_freqs = ctx.needs
        terms = []
        if grad_tangent is not None:
            terms.append(backward(grad_tangent, y, positions, freqs, settings, ctx.needs))
        if y_tangent is not None:
            needs = (False, need_positions, need_freqs)
            terms.append(backward(grad, y_tangent, positions, freqs, settings, needs))
        if position_tangent is not None:
            needs = (False, False, need_freqs)
            terms.append(backward(grad, y, position_tangent, freqs, settings, needs))
        if freq_tangent is not None:
            needs = (False, need_positions, False)
            terms.append(backward(grad, y, positions, freq_tangent, settings, needs))
        if need_x and not (position_tangent is None and freq_tangent is None):
            turned = _quarter_turn(grad_x, positions, freqs, position_tangent, freq_tangent, settings)
            terms.append((-turned, None, None))
        tangents = []
        likes = (y, positions if need_positions else y, freqs)
        for column, like, need in zip(zip(*terms, strict=True), likes, ctx.needs, strict=True):
            tangent = _sum([t for t in column if t is not None])
            if tangent is None:  # which torch.func refuses, for results that aren't needed, too
                tangent = torch.zeros_like(like) if need else like.new_zeros(0)
            tangents.append(tangent)
        return tuple(tangents)

    @staticmethod
    def vmap(info, in_dims, grad, y, positions, freqs, settings, needs):
        results = _each(
            lambda *entry: _routes.backward_op(entry, settings, needs),
            info.batch_size,
            in_dims,
            (grad, y, positions, freqs),
        )
        return results, (0, 0, 0)
