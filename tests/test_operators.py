"""torch.ops.nd_rotary: opcheck, fake kernels, and the definitions for devices without kernels."""

import itertools

import pytest
import torch
from conftest import leaf, shape_of
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from nd_rotary_encodings._ops import DEFAULT_SETTINGS

ops = torch.ops.nd_rotary


def strided(*shape):
    """Every other channel of a wider tensor, whose first two dims are swapped in memory."""
    *lead, channels = shape
    wide = torch.randn(*reversed(lead[:2]), *lead[2:], 2 * channels)[..., ::2]
    return wide.transpose(0, 1) if len(lead) > 1 else wide


# ---- opcheck

ROTATE = {
    "plain": lambda: (torch.randn(2, 3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)),
    "strides": lambda: (strided(2, 3, 2, 8), strided(3, 2), strided(2, 2, 4)),
    "expanded": lambda: (
        torch.randn(1, 3, 2, 8).expand(2, 3, 2, 8),
        torch.randn(1, 2).expand(3, 2),
        torch.randn(2, 1, 4).expand(2, 2, 4),
    ),
    "x broadcast": lambda: (torch.randn(1, 3, 2, 8), torch.randn(4, 3, 2), torch.randn(2, 1, 4)),
    "heads in the last dim": lambda: (torch.randn(2, 3, 16), torch.randn(3, 2), torch.randn(2, 2, 4), 2),
    "half, heads first, prefix, inverse": lambda: (
        torch.randn(2, 2, 4, 8),
        torch.randn(3, 2),
        torch.randn(2, 1, 2),
        0,
        4,
        1,
        1,
        True,
        True,
    ),
    "bfloat16 and float64": lambda: (
        torch.randn(3, 2, 8).bfloat16(),
        torch.randn(3, 2).double(),
        torch.randn(2, 2, 4).half(),
    ),
    "integer positions": lambda: (torch.randn(3, 2, 8), torch.arange(6).view(3, 2), torch.randn(2, 2, 4)),
    "no tokens": lambda: (torch.randn(0, 3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)),
    "no leading dims": lambda: (torch.randn(2, 8), torch.randn(2), torch.randn(2, 2, 4)),
}
every_rotation = pytest.mark.parametrize("arguments", ROTATE.values(), ids=ROTATE.keys())
BY_ANGLES = {
    "plain": lambda: (torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 4)),
    "strides": lambda: (strided(2, 3, 2, 8), strided(2, 3, 2, 4)),
    "shared heads": lambda: (torch.randn(2, 3, 2, 8), torch.randn(1, 3, 1, 4)),
    "x broadcast": lambda: (torch.randn(1, 3, 2, 8), torch.randn(2, 1, 2, 4)),
    "float16 and float64": lambda: (torch.randn(3, 2, 8).half(), torch.randn(3, 2, 4).double()),
    "no tokens": lambda: (torch.randn(0, 2, 8), torch.randn(1, 2, 4)),
}
every_rotation_by_angles = pytest.mark.parametrize("arguments", BY_ANGLES.values(), ids=BY_ANGLES.keys())
ANGLES = {
    "plain": lambda: (torch.randn(2, 3, 2), torch.randn(2, 1, 2, 4)),
    "groups": lambda: (torch.randn(3, 2), torch.randn(2, 3, 1, 4)),
    "strides": lambda: (strided(2, 3, 2), strided(2, 3, 2, 4)),
    "integer positions": lambda: (torch.arange(6).view(3, 2), torch.randn(2, 1, 2, 4).half()),
    "no tokens": lambda: (torch.randn(0, 2), torch.randn(2, 1, 2, 4)),
}
every_angle = pytest.mark.parametrize("arguments", ANGLES.values(), ids=ANGLES.keys())


def with_grad(arguments):
    return tuple(leaf(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)


def opcheck_rotation(op, arguments):
    """With float32's tolerances for all: float64 gradients, too, are sums of float32 products, in an order
    that depends on strides, and compilers change those."""
    opcheck(op, with_grad(arguments), rtol=1.3e-6, atol=1e-5)


@every_rotation
def test_opcheck_of_apply_rope(arguments):
    opcheck_rotation(ops.apply_rope.default, arguments())


@every_rotation
def test_opcheck_of_apply_rope_qk(arguments):
    x, *others = arguments()
    opcheck_rotation(ops.apply_rope_qk.default, (x, x + 1, *others))


@every_rotation_by_angles
def test_opcheck_of_rotate_embeddings(arguments):
    opcheck(ops.rotate_embeddings.default, with_grad(arguments()))


@every_angle
def test_opcheck_of_calculate_rope(arguments):
    opcheck(ops.calculate_rope.default, with_grad(arguments()))


def opcheck_raw(op, arguments, everything):
    """Raw operators know no autograd; dispatching them once in each way is enough."""
    utils = ("test_schema", "test_faketensor", *(["test_aot_dispatch_dynamic"] if everything else []))
    opcheck(op, arguments, test_utils=utils)


@pytest.mark.parametrize("name", ROTATE)
def test_opcheck_of_the_raw_rotations(name):
    arguments, everything = ROTATE[name](), name == "half, heads first, prefix, inverse"
    opcheck_raw(ops._rotate.default, arguments, everything)
    y = ops._rotate(*arguments)
    opcheck_raw(ops._rotate_.default, (y.clone(), *arguments[1:]), everything)
    opcheck_raw(ops._rotate_qk.default, (arguments[0], *arguments), everything)
    settings = (*arguments[3:], *DEFAULT_SETTINGS[len(arguments) - 3 :])
    for needs in ((True, arguments[1].is_floating_point(), True), (False, False, True), (True, False, False)):
        backward = (torch.randn_like(y), y, *arguments[1:3], *settings, *needs)
        opcheck_raw(ops._rotate_backward.default, backward, everything)
        both = (backward[0], torch.randn_like(y), y, y + 1, *backward[2:])
        opcheck_raw(ops._rotate_qk_backward.default, both, everything)


@pytest.mark.parametrize("name", BY_ANGLES)
def test_opcheck_of_the_raw_rotations_by_angles(name):
    (x, angles), everything = BY_ANGLES[name](), name == "strides"
    opcheck_raw(ops._rotate_by_angles.default, (x, angles), everything)
    full = ops._rotate_by_angles(x, angles)
    opcheck_raw(ops._rotate_by_angles_.default, (full.clone(), angles), everything)
    for needs in ((True, True), (True, False), (False, True)):
        backward = (torch.randn_like(full), full, angles, *needs)
        opcheck_raw(ops._rotate_by_angles_backward.default, backward, everything)


@pytest.mark.parametrize("name", ANGLES)
def test_opcheck_of_the_raw_angles(name):
    opcheck_raw(ops._calculate_angles.default, ANGLES[name](), name == "strides")


def test_operators_say_that_they_take_any_strides():
    """Else Inductor copies tensors into the strides that it traced."""
    public = (ops.apply_rope, ops.apply_rope_qk, ops.rotate_embeddings, ops.calculate_rope)
    rotations = (ops._rotate, ops._rotate_, ops._rotate_backward, ops._rotate_qk)
    by_angles = (ops._rotate_by_angles, ops._rotate_by_angles_, ops._rotate_by_angles_backward)
    for op in (*public, *rotations, *by_angles, ops._calculate_angles):
        assert torch.Tag.flexible_layout in op.default.tags


# ---- fake kernels and definitions against the kernels in C


def embeddings_in_many_layouts():
    """`[2, 3, 2, 4]` and broadcast relatives: dense in all orders of dims, and not dense."""
    for order in itertools.permutations(range(4)):
        x = torch.randn([(2, 3, 2, 4)[d] for d in order])
        yield x.permute([order.index(d) for d in range(4)])
    yield torch.randn(2, 3, 2, 8)[..., :4]
    yield torch.randn(2, 3, 1, 4).expand(2, 3, 2, 4)
    yield torch.randn(1, 3, 2, 4)
    yield torch.randn(2, 1, 2, 4).transpose(0, 1)


FORWARD_CALLS = {
    **{f"rotation, {name}": (ops._rotate, arguments) for name, arguments in ROTATE.items()},
    **{f"by angles, {name}": (ops._rotate_by_angles, arguments) for name, arguments in BY_ANGLES.items()},
    **{f"angles, {name}": (ops._calculate_angles, arguments) for name, arguments in ANGLES.items()},
}
every_forward = pytest.mark.parametrize(("op", "arguments"), FORWARD_CALLS.values(), ids=FORWARD_CALLS.keys())


@every_forward
def test_fake_kernel_has_the_shape_strides_and_dtype_of_the_real_one(op, arguments):
    arguments = arguments()
    mode = FakeTensorMode()
    with mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        fake = op(*fakes)
    assert shape_of(fake) == shape_of(op(*arguments))
    on_meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    assert on_meta.is_meta
    assert on_meta.shape == fake.shape


@pytest.mark.parametrize(
    ("heads", "head_dim_first"),
    [(False, False), (False, True), (True, False)],
    ids=["tokens first", "heads first", "heads in the last dim"],
)
def test_fake_kernel_has_the_strides_of_the_real_one_for_any_order_of_dims(heads, head_dim_first):
    for x in embeddings_in_many_layouts():
        n_heads = x.shape[-3 if head_dim_first else -2]
        tokens = x.shape[-2 if head_dim_first else -3]
        positions, freqs = torch.randn(tokens, 2), torch.randn(2, n_heads, x.shape[-1] // 2)
        count = 0
        if heads:
            x, count = x[..., 0, :], 2
            positions, freqs = torch.randn(x.shape[-2], 2), torch.randn(2, 1, x.shape[-1] // 4)
        settings = (count, 2, 0, 0, head_dim_first, False)
        mode = FakeTensorMode()
        with mode:
            fake = ops._rotate(*(mode.from_tensor(t) for t in (x, positions, freqs)), *settings)
        y = ops._rotate(x, positions, freqs, *settings)
        assert shape_of(fake) == shape_of(y)
        gradient = torch.randn(y.shape)
        real = ops._rotate_backward(gradient, y, positions, freqs, *settings, True, True, True)
        with mode:
            fakes = ops._rotate_backward(
                *(mode.from_tensor(t) for t in (gradient, y, positions, freqs)), *settings, True, True, True
            )
        assert [shape_of(t) for t in fakes] == [shape_of(t) for t in real]


def definition(op):
    """What runs on a device without a kernel, here on CPU tensors."""
    return lambda *arguments: op.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


@every_forward
def test_definition_for_other_devices_has_the_values_and_strides_of_the_kernel(op, arguments):
    arguments = arguments()
    if op is ops._rotate:
        arguments = (*arguments, *DEFAULT_SETTINGS[len(arguments) - 3 :])
    actual, expected = definition(op)(*arguments), op(*arguments)
    assert shape_of(actual) == shape_of(expected)
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@every_rotation
def test_definition_in_place_and_backward_have_the_values_of_the_kernel(arguments):
    arguments = arguments()
    arguments = (*arguments, *DEFAULT_SETTINGS[len(arguments) - 3 :])
    y = ops._rotate(*arguments)
    tolerance = 4 * torch.finfo(y.dtype).eps
    by_definition, by_kernel = y.clone(), y.clone()
    assert definition(ops._rotate_)(by_definition, *arguments[1:]) is None
    ops._rotate_(by_kernel, *arguments[1:])
    torch.testing.assert_close(by_definition, by_kernel, rtol=tolerance, atol=tolerance)
    needs = (True, arguments[1].is_floating_point(), True)
    backward = (torch.randn(y.shape).to(y.dtype), y, *arguments[1:], *needs)
    results = definition(ops._rotate_backward)(*backward), ops._rotate_backward(*backward)
    both = (backward[0], backward[0] * 2, y, y + 1, *backward[2:])
    of_both = definition(ops._rotate_qk_backward)(*both), ops._rotate_qk_backward(*both)
    rotated = definition(ops._rotate_qk)(y, y + 1, *arguments[1:]), ops._rotate_qk(y, y + 1, *arguments[1:])
    for a, b in itertools.chain(*(zip(*pair, strict=True) for pair in (results, of_both))):
        assert shape_of(a) == shape_of(b)
        torch.testing.assert_close(
            a, b, rtol=1e-3 if b.dtype == torch.float16 else 2e-2 * tolerance + 1e-5, atol=1e-4
        )
    for a, b in zip(*rotated, strict=True):
        assert shape_of(a) == shape_of(b)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_rotation_by_angles
def test_definition_by_angles_in_place_and_backward_have_the_values_of_the_kernel(arguments):
    x, angles = arguments()
    x = ops._rotate_by_angles(x, angles)
    tolerance = 4 * torch.finfo(x.dtype).eps
    by_definition, by_kernel = x.clone(), x.clone()
    assert definition(ops._rotate_by_angles_)(by_definition, angles) is None
    ops._rotate_by_angles_(by_kernel, angles)
    torch.testing.assert_close(by_definition, by_kernel, rtol=tolerance, atol=tolerance)
    gradient = torch.randn(x.shape).to(x.dtype)
    results = (
        run(gradient, x, angles, True, True)
        for run in (definition(ops._rotate_by_angles_backward), ops._rotate_by_angles_backward)
    )
    for a, b in zip(*results, strict=True):
        assert shape_of(a) == shape_of(b)
        torch.testing.assert_close(a, b, rtol=1e-3 if x.dtype == torch.float16 else 1e-5, atol=1e-4)
