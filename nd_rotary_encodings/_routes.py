"""Which way a rotation goes: eager kernel, autograd Function, operator for tracing, or plain PyTorch."""

import sys

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _autograd, _ops, _transforms
from ._ops import inverse_of
from .reference import queries_and_keys

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_transformed() -> bool:
    """Whether a torch.func transform or a level of dual numbers is active.

    Asking for ``requires_grad`` alone would send a dual tensor to an operator that drops its tangent. (What
    Dynamo sees of ``peek_interpreter_stack`` is never None itself, only of its type.)
    """
    return forward_ad._current_level >= 0 or not isinstance(peek_interpreter_stack(), type(None))


def is_traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_distributed(*tensors: Tensor) -> bool:
    """Whether one of them is a DTensor. If so, the operators have rules for it from here on: the import also
    happens while a graph is traced."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from . import _sharding

    return any(isinstance(t, _sharding.DTensor) for t in tensors)


def needs_definition(*tensors: Tensor) -> bool:
    """Whether the operators can't be used: by transforms inside ``torch.compile``, for ONNX, which knows no
    operators but PyTorch's, and wrapper subclasses other than DTensor, which have rules for those only."""
    distributed = is_distributed(*tensors)  # while tracing, too, as it registers the rules
    if is_traced():
        return is_transformed() or torch.onnx.is_in_onnx_export()
    return not distributed and any(is_traceable_wrapper_subclass(t) for t in tensors)


def is_plain(x: Tensor, positions: Tensor, freqs: Tensor) -> bool:
    """Whether this is eager code on plain tensors: no tracing, no transform, no dual or wrapped tensor."""
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
    if is_distributed(x, positions, freqs):
        from ._sharding import distribute

        x, positions, freqs = distribute(x, positions, freqs)
        if settings[0]:  # heads may be sharded, too: each process has some of them
            x = x.unflatten(-1, (settings[0], -1))
            return rotate_any(x, positions, freqs, (0, *settings[1:])).flatten(-2)
    if needs_definition(x, positions, freqs):
        return _ops.rotate_definition(x, positions, freqs, *settings)
    if is_transformed():
        return _transforms.RotateTransformed.apply(x, positions, freqs, settings)
    return _ops.apply_rope(x, positions, freqs, *settings)


def rotate_qk(
    query: Tensor, key: Tensor, positions: Tensor, freqs: Tensor, settings: tuple
) -> tuple[Tensor, Tensor]:
    """:func:`rotate_any` of both, with cosines and sines formed once for both where the kernels are used."""
    learned = positions.requires_grad or freqs.requires_grad
    # with a derivative, one operator's results both need gradients
    if learned or query.requires_grad == key.requires_grad or not torch.is_grad_enabled():
        if is_plain(query, positions, freqs) and type(key) in _PLAIN_TYPES:
            if _records(query, positions, freqs):
                return _autograd.RotateQK.apply(query, key, positions, freqs, *settings)
            return _ops.rotate_qk(query, key, positions, freqs, *settings)
        tensors = (query, key, positions, freqs)
        if not (is_transformed() or is_distributed(*tensors) or needs_definition(*tensors)):
            return _ops.apply_rope_qk(*tensors, *settings)
    return rotate_any(query, positions, freqs, settings), rotate_any(key, positions, freqs, settings)


def can_join(grads, outputs, *others: Tensor) -> bool:
    """Whether the backward of :func:`rotate_qk` can be one call of a kernel."""
    return (
        all(grad is not None for grad in grads)
        and not torch.is_grad_enabled()
        and not is_transformed()
        and not is_distributed(*grads, *others)
        and _lie_alike(*grads)
        and (outputs[0] is None or _lie_alike(*outputs))
    )


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    # the dispatcher hands over others with strides of their own in place of these
    return a.is_neg() == b.is_neg() and a._is_zerotensor() == b._is_zerotensor()


def rotate_any_(x: Tensor, positions: Tensor, freqs: Tensor, settings: tuple) -> Tensor:
    """``apply_rope_`` after its checks."""
    if not is_plain(x, positions, freqs):
        if needs_definition(x, positions, freqs):
            # of a clone, as the definition's backward needs the values that are overwritten
            return x.copy_(rotate_any(x.clone(), positions, freqs, settings))
        if is_transformed() or is_distributed(x, positions, freqs):
            return x.copy_(rotate_any(x, positions, freqs, settings))
        if is_traced():
            if _records(x, positions, freqs) or torch.compiler.is_exporting():
                # decompositions() reaches functional operators only
                return x.copy_(_ops.apply_rope(x, positions, freqs, *settings))
            torch.ops.nd_rotary._rotate_(x, positions, freqs, *settings)
            return x
    if is_legacy_batchedtensor(x):  # autograd.grad(is_grads_batched=True) lets no operator of ours write
        return x.copy_(rotate_any(x, positions, freqs, settings))
    if _records(x, positions, freqs):
        return _autograd.Rotate.apply(x, positions, freqs, settings, True)
    _ops.rotate_(x, positions, freqs, *settings)
    torch.autograd.graph.increment_version(x)
    return x


def rotate_packed_(qkv: Tensor, positions: Tensor, freqs: Tensor, settings: tuple) -> Tensor:
    """``apply_rope_qkv_`` after its checks."""
    if (
        not _records(qkv, positions, freqs)
        or is_transformed()
        or is_distributed(qkv, positions, freqs)
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or needs_definition(qkv, positions, freqs)
    ):
        rotate_any_(queries_and_keys(qkv, settings[4]), positions, freqs, settings)
        return qkv
    if torch.compiler.is_compiling():
        # On a clone, as nothing would notice that what the backward needs is changed later; and written back
        # outside of the Function, as what that writes into an input of the graph has no gradient. The
        # compiler leaves out both copies.
        rotated = _autograd.RotatePacked.apply(qkv.clone(), qkv.shape, positions, freqs, settings)
        return qkv.copy_(rotated)
    base = qkv._base
    if (
        base is not None
        and base.numel() == qkv.numel()
        and base.is_contiguous()
        and qkv.is_contiguous()
        and base.storage_offset() == qkv.storage_offset()
    ):
        # a view of all of a tensor, as linear layers return: to modify a view costs copies in the backward
        return _autograd.RotatePacked.apply(base, qkv.shape, positions, freqs, settings).view(qkv.shape)
    return _autograd.RotatePacked.apply(qkv, qkv.shape, positions, freqs, settings)


def backward_op(tensors: tuple[Tensor, ...], settings: tuple, needs):
    """From ``(grad, y, positions, freqs)`` the gradients of ``x``, broadcast as ``y``, of ``positions`` and
    ``freqs``; empty where not needed."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if differentiable or (is_transformed() and not is_traced()):
        return _transforms.RotateBackward.apply(*tensors, settings, needs)
    return _ops.rotate_backward(*tensors, *settings, *needs)


def rotate_backward_any(
    grad: Tensor, y: Tensor, positions: Tensor, freqs: Tensor, settings: tuple, needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of :func:`backward_op`, None where not needed."""
    if needs[1] or needs[2]:
        results = backward_op((grad, y, positions, freqs), settings, needs)
        grad_x, grad_positions, grad_freqs = (r if n else None for r, n in zip(results, needs, strict=True))
        return grad_x, grad_positions, grad_freqs
    return rotate_any(grad, positions, freqs, inverse_of(settings)) if needs[0] else None, None, None
