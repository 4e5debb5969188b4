"""The operators ``torch.ops.nd_rotary.*``: schema, shape function and, for devices without a kernel,
definition.

Names with a leading underscore are the raw operators, without autograd, which eager code calls: registering
autograd makes every call dearer, gradients or not. The public twins, with the same kernels, know their
derivatives (_autograd.py); they serve ``torch.compile``, ``torch.export``, TorchScript and direct callers.

The CPU kernels come from C (csrc/torch/ops.h), where the order of the arguments must be that of the schemas.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import _C, reference  # noqa: F401  (_C registers the kernels)

# heads: 0 where x is [..., H, D], or the number of heads where it is [..., H * D]
_ROTATE = (
    "Tensor positions, Tensor freqs, int heads=0, int block=2, int rotary_offset=0, "
    "int num_prefix_tokens=0, bool head_dim_first=False, bool inverse=False"
)
_ROTATE_BACKWARD = (
    "Tensor positions, Tensor freqs, int heads, int block, int rotary_offset, "
    "int num_prefix_tokens, bool head_dim_first, bool inverse, "
    "bool need_x, bool need_positions, bool need_freqs"
)

_library = torch.library.Library("nd_rotary", "DEF")
_decompositions = {}


def _operator(
    schema: str, shape_function, definition, *names: str, strides=torch.Tag.flexible_layout
) -> None:
    for name in names:
        # kernels take any strides; without the tag Inductor would copy tensors into the strides it traced
        _library.define(name + schema, tags=(strides, torch.Tag.pt2_compliant_tag))
        _library.impl(name, definition, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nd_rotary::{name}", shape_function, lib=_library)
        operator = getattr(torch.ops.nd_rotary, name).default
        if not operator._schema.is_mutable:
            _decompositions[operator] = definition


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """The definitions of the operators in PyTorch's own operators, to take an exported program apart.

    Only on request: without them programs call the kernels, which are faster and store no angles.

    Returns:
        A new dict for ``torch.export.ExportedProgram.run_decompositions``.
    """
    return dict(_decompositions)


def _check_backends(first: Tensor, *others: Tensor) -> None:
    """The dispatcher takes the kernel of one of the devices; for strided tensors on the CPU the C code
    checks."""
    for other in (first, *others):
        if other.device != first.device:
            raise RuntimeError(f"all tensors must be on one device, got {first.device} and {other.device}")
        # arithmetic with sparse tensors skips what they leave out, and angles would be wrong
        if other.layout != torch.strided or other.is_quantized:
            raise RuntimeError(
                f"all tensors must be strided and not quantized, got {other.layout} and {other.dtype}"
            )


def _like(x: Tensor, shape) -> Tensor:
    """An empty tensor with the strides of ``x`` where it has that shape and is dense, else contiguous."""
    if x.ndim == len(shape) and tuple(x.shape) == tuple(shape):
        like = torch.empty_like(x)
        if like.stride() == x.stride():
            return like
    return x.new_empty(shape)


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    """``values`` in the order of strides of a dense tensor, by operators that a decomposition may hold."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    inverse = sorted(range(like.ndim), key=order.__getitem__)
    return values.permute(order).contiguous().permute(inverse)


def _rotated_shape(x: Tensor, positions: Tensor, heads: int, prefix: int, head_dim_first: bool) -> list[int]:
    lead, inner = list(x.shape[: -1 if heads else -2]), list(x.shape[-1 if heads else -2 :])
    if head_dim_first:
        lead, inner = [*x.shape[:-3], x.shape[-2]], [x.shape[-3], x.shape[-1]]
    if prefix:
        lead[-1] -= prefix
    lead = list(torch.broadcast_shapes(lead, positions.shape[:-1]))
    if prefix:
        lead[-1] += prefix
    if head_dim_first:
        return [*lead[:-1], inner[0], lead[-1], inner[1]]
    return [*lead, *inner]


def _rotate_fake(
    x,
    positions,
    freqs,
    heads=0,
    block=2,
    rotary_offset=0,
    num_prefix_tokens=0,
    head_dim_first=False,
    inverse=False,
):
    _check_backends(x, positions, freqs)
    return _like(x, _rotated_shape(x, positions, heads, num_prefix_tokens, head_dim_first))


def rotate_definition(x, positions, freqs, *settings):
    _check_backends(x, positions, freqs)
    y = reference.apply_rope(x, positions, freqs, *settings)
    return _laid_out(y, _like(x, y.shape))


def _rotate_in_place_fake(x, positions, freqs, *settings):
    _check_backends(x, positions, freqs)


def _rotate_in_place_definition(x, positions, freqs, *settings):
    _check_backends(x, positions, freqs)
    x.copy_(reference.apply_rope(x, positions, freqs, *settings))


def _rotate_backward_fake(grad, y, positions, freqs, *settings_and_needs):
    _check_backends(grad, y, positions, freqs)
    need_x, need_positions, need_freqs = settings_and_needs[-3:]
    return (
        _like(y, y.shape) if need_x else y.new_empty(0),
        torch.empty_like(positions, memory_format=torch.contiguous_format)
        if need_positions
        else y.new_empty(0),
        torch.empty_like(freqs, memory_format=torch.contiguous_format) if need_freqs else freqs.new_empty(0),
    )


def _rotate_backward_definition(grad, y, positions, freqs, *settings_and_needs):
    _check_backends(grad, y, positions, freqs)
    settings, needs = settings_and_needs[:-3], settings_and_needs[-3:]
    results = reference.apply_rope_backward(grad, y, positions, freqs, settings, needs)
    empty = _rotate_backward_fake(grad, y, positions, freqs, *settings_and_needs)
    return tuple(e if r is None else _laid_out(r, e) for r, e in zip(results, empty, strict=True))


def _rotate_qk_fake(query, key, *arguments):
    return _rotate_fake(query, *arguments), _rotate_fake(key, *arguments)


def _rotate_qk_definition(query, key, *arguments):
    _check_backends(query, key, *arguments[:2])
    return rotate_definition(query, *arguments), rotate_definition(key, *arguments)


def _rotate_qk_backward_fake(grad_query, grad_key, y_query, y_key, *arguments):
    grad_query, *sums = _rotate_backward_fake(grad_query, y_query, *arguments)
    return grad_query, _rotate_backward_fake(grad_key, y_key, *arguments)[0], *sums


def _rotate_qk_backward_definition(grad_query, grad_key, y_query, y_key, *arguments):
    _check_backends(grad_query, grad_key, y_query, y_key, *arguments[:2])
    of_query = _rotate_backward_definition(grad_query, y_query, *arguments)
    of_key = _rotate_backward_definition(grad_key, y_key, *arguments)
    return of_query[0], of_key[0], of_query[1] + of_key[1], of_query[2] + of_key[2]


def _rotate_by_angles_fake(x, angles):
    _check_backends(x, angles)
    lead = torch.broadcast_shapes(x.shape[:-2], angles.shape[:-2])
    return x.new_empty((*lead, *x.shape[-2:]))


def rotate_by_angles_definition(x, angles):
    _check_backends(x, angles)
    return reference.rotate_by_angles(x, angles).contiguous()


def _rotate_by_angles_in_place_fake(x, angles):
    _check_backends(x, angles)


def _rotate_by_angles_in_place_definition(x, angles):
    _check_backends(x, angles)
    x.copy_(reference.rotate_by_angles(x, angles))


def _rotate_by_angles_backward_fake(grad, x, angles, need_x, need_angles):
    _check_backends(grad, x, angles)
    return (
        x.new_empty(x.shape) if need_x else x.new_empty(0),
        angles.new_empty(angles.shape) if need_angles else angles.new_empty(0),
    )


def _rotate_by_angles_backward_definition(grad, x, angles, need_x, need_angles):
    from .angles import rotate_embeddings_backward

    _check_backends(grad, x, angles)
    results = rotate_embeddings_backward(grad, x, angles, need_x, need_angles)
    empty = _rotate_by_angles_backward_fake(grad, x, angles, need_x, need_angles)
    return tuple(e if r is None else _laid_out(r, e) for r, e in zip(results, empty, strict=True))


def _calculate_angles_fake(positions, freqs):
    _check_backends(positions, freqs)
    return freqs.new_empty((*positions.shape[:-1], *freqs.shape[-2:]))


def calculate_angles_definition(positions, freqs):
    _check_backends(positions, freqs)
    wide = reference.wide_dtype(freqs.device)
    return reference.sum_over_axes(positions, freqs.to(wide).sum(1), wide).to(freqs.dtype)


_operator(
    f"(Tensor x, {_ROTATE}) -> Tensor",
    _rotate_fake,
    rotate_definition,
    "_rotate",
    "apply_rope",
)
_operator(
    f"(Tensor(a!) x, {_ROTATE}) -> ()",
    _rotate_in_place_fake,
    _rotate_in_place_definition,
    "_rotate_",
)
_operator(
    f"(Tensor grad, Tensor y, {_ROTATE_BACKWARD}) -> (Tensor, Tensor, Tensor)",
    _rotate_backward_fake,
    _rotate_backward_definition,
    "_rotate_backward",
)
_operator(
    f"(Tensor query, Tensor key, {_ROTATE}) -> (Tensor, Tensor)",
    _rotate_qk_fake,
    _rotate_qk_definition,
    "_rotate_qk",
    "apply_rope_qk",
)
_operator(
    f"(Tensor grad_query, Tensor grad_key, Tensor y_query, Tensor y_key, {_ROTATE_BACKWARD}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _rotate_qk_backward_fake,
    _rotate_qk_backward_definition,
    "_rotate_qk_backward",
    strides=torch.Tag.needs_exact_strides,  # alike for queries and keys
)
_operator(
    "(Tensor x, Tensor angles) -> Tensor",
    _rotate_by_angles_fake,
    rotate_by_angles_definition,
    "_rotate_by_angles",
    "rotate_embeddings",
)
_operator(
    "(Tensor(a!) x, Tensor angles) -> ()",
    _rotate_by_angles_in_place_fake,
    _rotate_by_angles_in_place_definition,
    "_rotate_by_angles_",
)
_operator(
    "(Tensor grad, Tensor x, Tensor angles, bool need_x, bool need_angles) -> (Tensor, Tensor)",
    _rotate_by_angles_backward_fake,
    _rotate_by_angles_backward_definition,
    "_rotate_by_angles_backward",
)
_operator(
    "(Tensor positions, Tensor freqs) -> Tensor",
    _calculate_angles_fake,
    calculate_angles_definition,
    "_calculate_angles",
    "calculate_rope",
)


def _with_negative_bit(op):
    """PyTorch's own way to take views with a lazy minus needs an operator that returns what it writes."""

    def resolved(x, *arguments):
        arguments = [a.resolve_neg() if isinstance(a, Tensor) else a for a in arguments]
        y = x.resolve_neg()
        op(y, *arguments)
        if y is not x:
            x.copy_(y)

    return resolved


_library.impl("_rotate_", _with_negative_bit(torch.ops.nd_rotary._rotate_), "Negative")
_library.impl("_rotate_by_angles_", _with_negative_bit(torch.ops.nd_rotary._rotate_by_angles_), "Negative")

# settings, here and elsewhere: the arguments after freqs, in the order of the schemas
DEFAULT_SETTINGS = (0, 2, 0, 0, False, False)


def inverse_of(settings: tuple) -> tuple:
    return (*settings[:-1], not settings[-1])


# For eager code: `_op` is the call without its Python frame. Default settings are cheaper left out than
# parsed.
rotate = torch.ops.nd_rotary._rotate.default._op
rotate_ = torch.ops.nd_rotary._rotate_.default._op
rotate_backward = torch.ops.nd_rotary._rotate_backward.default  # Dynamo traces no `_op`
rotate_qk = torch.ops.nd_rotary._rotate_qk.default._op
rotate_qk_backward = torch.ops.nd_rotary._rotate_qk_backward.default
rotate_by_angles_backward = torch.ops.nd_rotary._rotate_by_angles_backward.default
apply_rope = torch.ops.nd_rotary.apply_rope.default
apply_rope_qk = torch.ops.nd_rotary.apply_rope_qk.default
