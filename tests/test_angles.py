"""Angles, rotation by given angles, their explicit gradients, and all of it in TorchScript."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import leaf
from torch import Tensor

from nd_rotary_encodings import (
    calculate_rope,
    calculate_rope_backward,
    rotate_embeddings,
    rotate_embeddings_backward,
)

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float64, torch.float32, *HALF_TYPES)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def angles_by_sum(positions, freqs):
    return torch.einsum("...p,pghf->...hf", positions, freqs)


def rotated_as_complex(embeddings, angles):
    pairs = torch.view_as_complex(embeddings.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


# ---- calculate_rope

ANGLES = {
    "tokens": ((5, 2), (2, 1, 3, 4)),
    "batch and tokens": ((2, 5, 2), (2, 1, 3, 4)),
    "groups are summed": ((2, 5, 3), (3, 4, 2, 4)),
    "shared heads": ((2, 5, 3), (3, 2, 1, 4)),
    "many leading dims": ((2, 1, 3, 2, 2, 1), (1, 1, 2, 3)),
    "one pair": ((5, 1), (1, 1, 1, 1)),
}
every_angle = pytest.mark.parametrize(("position_shape", "freq_shape"), ANGLES.values(), ids=ANGLES.keys())


@every_angle
def test_angles_are_sums_over_axes_and_groups(position_shape, freq_shape):
    positions, freqs = double(*position_shape), double(*freq_shape)
    expected = np.einsum("...p,pghf->...hf", positions.numpy(), freqs.numpy())
    actual = calculate_rope(positions, freqs)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-13)
    assert actual.is_contiguous()


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_angles_have_the_dtype_of_the_frequencies_and_are_rounded_once(dtype):
    positions, freqs = torch.randn(50, 3), torch.randn(3, 2, 2, 5).to(dtype)
    exact = angles_by_sum(positions.double(), freqs.double())
    actual = calculate_rope(positions, freqs)
    assert actual.dtype == dtype
    assert (actual != exact.to(dtype)).sum() <= (actual.numel() // 100 if dtype == torch.float64 else 0)
    torch.testing.assert_close(actual, exact.to(dtype), rtol=1e-15, atol=1e-14)


def test_angles_of_large_integers_are_not_rounded_to_float32_first():
    freqs = torch.full((1, 1, 1, 1), 2.0**-20)
    for positions in (
        torch.tensor([[2**40 + 2**17]]),
        torch.tensor([[2.0**40 + 2**17]], dtype=torch.float64),
    ):
        assert calculate_rope(positions, freqs).item() == 2**20 + 0.125
    assert calculate_rope(torch.tensor([[2**24 + 1]]), freqs.double()).item() == (2**24 + 1) / 2**20


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_angles_of_every_integer_type(dtype):
    positions, freqs = torch.tensor([[0, 1], [7, 100], [5, 3]]), double(2, 1, 2, 3)
    torch.testing.assert_close(
        calculate_rope(positions.to(dtype), freqs),
        angles_by_sum(positions.double(), freqs),
        rtol=0,
        atol=1e-12,
    )


def test_angles_of_strided_operands_are_contiguous_and_right():
    positions, freqs = double(3, 5, 8).transpose(0, 1)[..., ::4], double(4, 3, 2, 2).permute(3, 2, 1, 0)
    actual = calculate_rope(positions, freqs)
    torch.testing.assert_close(actual, angles_by_sum(positions, freqs), rtol=0, atol=1e-13)
    assert actual.view(15, -1).shape == (15, 12)


def test_no_positions_give_no_angles():
    assert calculate_rope(torch.randn(0, 2), torch.randn(2, 1, 3, 4)).shape == (0, 3, 4)


# ---- calculate_rope_backward


@every_angle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_the_angles(position_shape, freq_shape, dtype):
    positions, freqs = leaf(double(*position_shape)), leaf(double(*freq_shape))
    angles = angles_by_sum(positions, freqs)
    g = torch.randn_like(angles)
    expected = torch.autograd.grad(angles, (positions, freqs), g)
    inputs = positions.detach().to(dtype), freqs.detach().to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    explicit = calculate_rope_backward(g.to(dtype), *inputs, True, True)
    leaves = [leaf(t) for t in inputs]
    by_autograd = torch.autograd.grad(calculate_rope(*leaves), leaves, g.to(dtype))
    for results in (explicit, by_autograd):
        for a, b in zip(results, expected, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, **tolerance)


@every_angle
def test_gradients_of_the_angles_are_contiguous(position_shape, freq_shape):
    positions, freqs = torch.randn(position_shape), torch.randn(freq_shape)
    g = torch.randn_like(calculate_rope(positions, freqs))
    for gradient in calculate_rope_backward(g, positions, freqs, True, True):
        assert gradient.is_contiguous()
        gradient.add_(1)


def test_gradients_of_strided_operands_of_the_angles():
    positions, freqs = double(3, 5, 8).transpose(0, 1)[..., ::4], double(4, 3, 2, 2).permute(3, 2, 1, 0)
    g = double(4, 3, 5, 3).permute(2, 1, 3, 0)
    expected = torch.autograd.grad(angles_by_sum(*(leaves := (leaf(positions), leaf(freqs)))), leaves, g)
    for a, b in zip(calculate_rope_backward(g, positions, freqs, True, True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert a.is_contiguous()


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)), ids=str)
def test_gradients_of_the_angles_not_asked_for_are_none(needs):
    results = calculate_rope_backward(
        torch.randn(5, 2, 3), torch.randn(5, 2), torch.randn(2, 1, 2, 3), *needs
    )
    assert [r is not None for r in results] == list(needs)


def test_gradients_of_angles_of_integer_positions():
    positions, freqs, g = torch.arange(10).view(5, 2), double(2, 1, 2, 3), double(5, 2, 3)
    gradient = calculate_rope_backward(g, positions, freqs, False, True)[1]
    expected = torch.einsum("nhf,np->phf", g, positions.double())[:, None]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("position_shape", "freq_shape"),
    [((1, 5, 2), (2, 1, 3, 4)), ((1, 1, 2), (2, 1, 3, 4)), ((4, 5, 2), (2, 1, 1, 4))],
)
def test_gradients_of_broadcast_operands_have_their_shapes(position_shape, freq_shape):
    positions, freqs, g = leaf(double(*position_shape)), leaf(double(*freq_shape)), double(4, 5, 3, 4)
    angles = angles_by_sum(positions, freqs).expand(4, 5, 3, 4)
    expected = torch.autograd.grad(angles, (positions, freqs), g)
    actual = calculate_rope_backward(g, positions.detach(), freqs.detach(), True, True)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_no_positions_give_zero_gradients_of_the_frequencies():
    positions, freqs = torch.randn(0, 2), torch.randn(2, 1, 3, 4)
    gradients = calculate_rope_backward(torch.randn(0, 3, 4), positions, freqs, True, True)
    assert gradients[0].shape == (0, 2)
    assert torch.equal(gradients[1], torch.zeros(2, 1, 3, 4))


# ---- rotate_embeddings

ROTATIONS = {
    "same shape": ((2, 5, 3, 8), (2, 5, 3, 4)),
    "shared heads": ((2, 5, 3, 8), (2, 5, 1, 4)),
    "angles for all of a batch": ((2, 5, 3, 8), (1, 5, 3, 4)),
    "embeddings for all of a batch": ((1, 5, 3, 8), (2, 5, 3, 4)),
    "both ways": ((2, 1, 3, 8), (1, 5, 1, 4)),
    "three dims": ((5, 3, 8), (5, 3, 4)),
    "many dims": ((2, 1, 2, 3, 2, 6), (1, 2, 2, 3, 1, 3)),
    "one pair": ((5, 1, 2), (5, 1, 1)),
    "wider than a vector": ((3, 2, 70), (3, 2, 35)),
}


# the result has more elements than the embeddings
WIDENING = ("embeddings for all of a batch", "both ways", "many dims")
every_rotation = pytest.mark.parametrize(("shape", "angle_shape"), ROTATIONS.values(), ids=ROTATIONS.keys())


@every_rotation
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_rotation_is_a_complex_multiplication(shape, angle_shape, dtype):
    embeddings, angles = torch.randn(shape).to(dtype), torch.randn(angle_shape, dtype=torch.float64) * 10
    exact = rotated_as_complex(embeddings.double(), angles)
    actual = rotate_embeddings(embeddings, angles)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    pairs = exact.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True)
    error = (actual.double() - exact).unflatten(-1, (-1, 2)) / pairs
    assert error.abs().max() < 2 * torch.finfo(dtype).eps


def test_rotation_by_known_angles():
    embeddings = torch.tensor([[[1.0, 0.0, 0.0, 1.0, 2.0, 3.0]]])
    angles = torch.tensor([[[math.pi / 2, math.pi / 6, 0.0]]])
    expected = [0.0, 1.0, -0.5, math.sqrt(3) / 2, 2.0, 3.0]
    assert rotate_embeddings(embeddings, angles)[0, 0].tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("angle_type", FLOAT_TYPES, ids=str)
def test_output_has_the_dtype_of_the_embeddings_whatever_the_angles_have(angle_type):
    embeddings, angles = torch.randn(5, 2, 8), torch.randn(5, 2, 4).to(angle_type)
    actual = rotate_embeddings(embeddings, angles)
    assert actual.dtype == torch.float32
    expected = rotated_as_complex(embeddings.double(), angles.double())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)


def odd_strides(*shape):
    """Not contiguous in any two dims: every other channel, and the first two dims swapped in memory."""
    wide = double(shape[1], shape[0], *shape[2:-1], 2 * shape[-1])
    return wide.transpose(0, 1)[..., ::2]


def test_rotation_of_strided_operands_is_contiguous_and_right():
    embeddings, angles = odd_strides(2, 5, 3, 8), odd_strides(2, 5, 3, 4)
    actual = rotate_embeddings(embeddings, angles)
    torch.testing.assert_close(actual, rotated_as_complex(embeddings, angles), rtol=0, atol=1e-14)
    assert actual.view(2, 5, 24).shape == (2, 5, 24)


def test_rotation_leaves_its_operands_alone():
    embeddings, angles = torch.randn(5, 2, 8), torch.randn(5, 2, 4)
    before = embeddings.clone(), angles.clone()
    rotate_embeddings(embeddings, angles)
    rotate_embeddings_backward(embeddings, embeddings, angles, needs_autograd=False)
    assert torch.equal(embeddings, before[0])
    assert torch.equal(angles, before[1])
    assert (embeddings._version, angles._version) == (0, 0)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("angle_shape", [(2, 5, 3, 4), (1, 5, 1, 4)], ids=str)
def test_without_autograd_the_rotation_is_in_place(dtype, angle_shape):
    embeddings, angles = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(angle_shape)
    expected, version = rotate_embeddings(embeddings, angles), embeddings._version
    assert rotate_embeddings(embeddings, angles, needs_autograd=False) is embeddings
    assert torch.equal(embeddings, expected)
    assert embeddings._version > version


def test_in_place_rotation_of_a_slice_writes_nothing_beside_it():
    buffer = torch.full((5, 3, 2, 16), math.nan)
    embeddings, angles = buffer[:, 1, :, 4:12], torch.randn(5, 2, 4)
    embeddings.copy_(torch.randn(5, 2, 8))
    expected = rotate_embeddings(embeddings, angles)
    rotate_embeddings(embeddings, angles, needs_autograd=False)
    assert torch.equal(embeddings, expected)
    assert buffer.isnan().sum() == buffer.numel() - embeddings.numel()


def test_in_place_rotation_of_a_leaf_is_pytorchs_error():
    embeddings, angles = torch.randn(5, 2, 8, requires_grad=True), torch.randn(5, 2, 4)
    before = embeddings.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        rotate_embeddings(embeddings, angles, needs_autograd=False)
    assert torch.equal(embeddings, before)
    with torch.no_grad():
        rotate_embeddings(embeddings, angles, needs_autograd=False)
    assert torch.equal(embeddings, rotate_embeddings(before, angles))


def in_place_on_a_copy(embeddings, angles):
    return rotate_embeddings(embeddings * 1, angles, needs_autograd=False)


def test_in_place_rotation_is_recorded_where_gradients_are():
    inputs = leaf(double(5, 2, 8)), leaf(double(5, 1, 4))
    weight = double(5, 2, 8)
    expected = torch.autograd.grad((rotate_embeddings(*inputs) * weight).sum(), inputs)
    for a, b in zip(
        torch.autograd.grad((in_place_on_a_copy(*inputs) * weight).sum(), inputs), expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert in_place_on_a_copy(inputs[0].detach(), inputs[1]).requires_grad
    with torch.no_grad():
        assert not in_place_on_a_copy(*inputs).requires_grad


def test_in_place_rotation_and_explicit_gradients_have_derivatives_under_torch_func():
    embeddings, angles, tangent = double(5, 2, 8), double(5, 1, 4), double(5, 2, 8)
    _, expected = torch.func.jvp(rotate_embeddings, (embeddings, angles), (tangent, angles))
    _, actual = torch.func.jvp(in_place_on_a_copy, (embeddings, angles), (tangent, angles))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)

    def of_angles(needs_autograd):
        gradients = lambda x: rotate_embeddings_backward(tangent, x, angles, needs_autograd=needs_autograd)  # noqa: E731
        return torch.func.grad(lambda x: gradients(x)[1].sin().sum())(embeddings)

    assert torch.equal(of_angles(False), of_angles(True))
    of_embeddings = torch.func.grad(lambda x: in_place_on_a_copy(x, angles).sin().sum())(embeddings)
    wanted = torch.func.grad(lambda x: rotate_embeddings(x, angles).sin().sum())(embeddings)
    torch.testing.assert_close(of_embeddings, wanted, rtol=0, atol=1e-13)


def test_no_embeddings_give_no_rotation():
    assert rotate_embeddings(torch.randn(0, 2, 8), torch.randn(1, 2, 4)).shape == (0, 2, 8)
    assert rotate_embeddings(torch.randn(1, 2, 8), torch.randn(0, 2, 4)).shape == (0, 2, 8)


# ---- rotate_embeddings_backward


@every_rotation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_the_rotation_by_autograd(shape, angle_shape, dtype):
    leaves = leaf(double(*shape)), leaf(double(*angle_shape))
    exact = rotated_as_complex(*leaves)
    g = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, leaves, g)
    inputs = [leaf(t.to(dtype)) for t in leaves]
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for a, b in zip(
        torch.autograd.grad(rotate_embeddings(*inputs), inputs, g.to(dtype)), expected, strict=True
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, **tolerance)


@pytest.mark.parametrize("needs_autograd", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in ROTATIONS if name not in WIDENING])
def test_explicit_gradients_of_the_rotation(name, dtype, needs_autograd):
    shape, angle_shape = ROTATIONS[name]
    leaves = leaf(double(*shape)), leaf(double(*angle_shape))
    exact = rotated_as_complex(*leaves)
    g = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, leaves, g)
    inputs = [t.detach().to(dtype) for t in leaves]
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    actual = rotate_embeddings_backward(g.to(dtype), *inputs, needs_autograd=needs_autograd)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        torch.testing.assert_close(a.double(), b, **tolerance)


@pytest.mark.parametrize("needs_autograd", [True, False])
def test_explicit_gradients_of_strided_operands_are_contiguous_and_right(needs_autograd):
    embeddings, angles, g = odd_strides(2, 5, 3, 8), odd_strides(2, 5, 3, 4), odd_strides(2, 5, 3, 8)
    leaves = leaf(embeddings), leaf(angles)
    expected = torch.autograd.grad(rotated_as_complex(*leaves), leaves, g)
    actual = rotate_embeddings_backward(g, embeddings, angles, needs_autograd=needs_autograd)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert a.is_contiguous()


@pytest.mark.parametrize("needs_autograd", [True, False])
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)), ids=str)
def test_explicit_gradients_not_asked_for_are_none(needs, needs_autograd):
    embeddings, angles, g = double(5, 2, 8), double(5, 1, 4), double(5, 2, 8)
    both = rotate_embeddings_backward(g, embeddings, angles)
    actual = rotate_embeddings_backward(g, embeddings, angles, *needs, needs_autograd=needs_autograd)
    for a, b, need in zip(actual, both, needs, strict=True):
        assert (a is not None) == need
        if need:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("needs_autograd", [True, False])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_explicit_gradients_of_half_precision_are_rounded_once(dtype, needs_autograd):
    embeddings, angles, g = (
        torch.randn(40, 2, 8).to(dtype),
        torch.randn(40, 1, 4),
        torch.randn(40, 2, 8).to(dtype),
    )
    leaves = leaf(embeddings.double()), leaf(angles.double())
    expected = torch.autograd.grad(rotated_as_complex(*leaves), leaves, g.double())
    actual = rotate_embeddings_backward(g, embeddings, angles, needs_autograd=needs_autograd)
    assert [t.dtype for t in actual] == [dtype, torch.float32]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=0, atol=4 * eps)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=0, atol=16 * eps)


@pytest.mark.parametrize("needs_autograd", [True, False])
def test_explicit_gradients_have_the_dtypes_of_the_operands_whatever_the_gradient_has(needs_autograd):
    embeddings, angles, g = torch.randn(5, 2, 8), double(5, 2, 4), torch.randn(5, 2, 8)
    expected = rotate_embeddings_backward(g, embeddings, angles, needs_autograd=needs_autograd)
    actual = rotate_embeddings_backward(g.double(), embeddings, angles, needs_autograd=needs_autograd)
    assert [t.dtype for t in actual] == [torch.float32, torch.float64]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_explicit_gradients_are_differentiable():
    inputs = [leaf(double(3, 2, 4)), leaf(double(3, 2, 4)), leaf(double(3, 1, 2))]
    assert torch.autograd.gradcheck(lambda *args: rotate_embeddings_backward(*args), inputs)
    angle_inputs = [leaf(double(3, 2, 2)), leaf(double(3, 2)), leaf(double(2, 1, 2, 2))]
    assert torch.autograd.gradcheck(lambda *args: calculate_rope_backward(*args, True, True), angle_inputs)


@pytest.mark.parametrize("needs_autograd", [True, False])
def test_no_embeddings_give_zero_gradients_of_the_angles(needs_autograd):
    empty = torch.randn(0, 2, 8)
    gradients = rotate_embeddings_backward(empty, empty, torch.randn(1, 2, 4), needs_autograd=needs_autograd)
    assert gradients[0].shape == (0, 2, 8)
    assert torch.equal(gradients[1], torch.zeros(1, 2, 4))


# ---- TorchScript: functions of existing clients


def script_angles(positions: Tensor, rope_freqs: Tensor) -> Tensor:
    return calculate_rope(positions, rope_freqs)


def script_rotation(embeddings: Tensor, rope_encoding: Tensor) -> Tensor:
    return rotate_embeddings(embeddings, rope_encoding).flatten(-2, -1)


def script_rotation_in_place(embeddings: Tensor, rope_encoding: Tensor) -> Tensor:
    return rotate_embeddings(embeddings, rope_encoding, needs_autograd=False).view(embeddings.size(0), -1)


def script_rotation_backward(
    grad_rotated: Tensor, embeddings: Tensor, rope_encoding: Tensor, differentiable: bool
) -> tuple[Tensor | None, Tensor | None]:
    if differentiable:
        return rotate_embeddings_backward(grad_rotated, embeddings, rope_encoding)
    return rotate_embeddings_backward(
        grad_rotated,
        embeddings,
        rope_encoding,
        needs_grad_embeddings=True,
        needs_grad_rope_encoding=True,
        needs_autograd=False,
    )


def script_angles_backward(
    grad_angles: Tensor, positions: Tensor, rope_freqs: Tensor, needs_positions: bool, needs_freqs: bool
) -> tuple[Tensor | None, Tensor | None]:
    return calculate_rope_backward(grad_angles, positions, rope_freqs, needs_positions, needs_freqs)


def test_scripted_calculate_rope():
    positions, freqs = torch.randn(4, 3, 2), torch.randn(2, 2, 1, 4)
    scripted = torch.jit.script(script_angles)
    expected = torch.einsum("...p,pghf->...hf", positions, freqs)
    torch.testing.assert_close(scripted(positions, freqs), expected)
    leaves = leaf(positions), leaf(freqs)
    gradients = torch.autograd.grad(scripted(*leaves).sin().sum(), leaves)
    wanted = torch.autograd.grad(torch.einsum("...p,pghf->...hf", *leaves).sin().sum(), leaves)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_scripted_rotate_embeddings():
    embeddings, angles = torch.randn(3, 2, 8), torch.randn(3, 1, 4)
    scripted = torch.jit.script(script_rotation)
    leaves = leaf(embeddings), leaf(angles)
    rotated = scripted(*leaves)
    expected = rotated_as_complex(*leaves).flatten(-2)
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(rotated.sin().sum(), leaves)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_scripted_rotate_embeddings_in_place():
    embeddings, angles = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    expected = rotated_as_complex(embeddings, angles)
    rotated = torch.jit.script(script_rotation_in_place)(embeddings, angles)
    assert rotated.data_ptr() == embeddings.data_ptr()
    torch.testing.assert_close(embeddings, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("differentiable", [True, False])
def test_scripted_rotate_embeddings_backward(differentiable):
    embeddings, angles, g = leaf(torch.randn(3, 2, 8)), leaf(torch.randn(3, 1, 4)), torch.randn(3, 2, 8)
    expected = torch.autograd.grad(rotated_as_complex(embeddings, angles), (embeddings, angles), g)
    scripted = torch.jit.script(script_rotation_backward)
    actual = scripted(g, embeddings.detach(), angles.detach(), differentiable)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_scripted_calculate_rope_backward(needs):
    positions, freqs, g = leaf(torch.randn(4, 3, 2)), leaf(torch.randn(2, 2, 2, 4)), torch.randn(4, 3, 2, 4)
    expected = torch.autograd.grad(torch.einsum("...p,pghf->...hf", positions, freqs), (positions, freqs), g)
    scripted = torch.jit.script(script_angles_backward)
    actual = scripted(g, positions.detach(), freqs.detach(), *needs)
    for a, b, need in zip(actual, expected, needs, strict=True):
        if need:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert a is None


def test_scripted_functions_check_their_arguments():
    with pytest.raises(
        Exception, match="Expected embeddings and rope_encoding to have the same number of dims"
    ):
        torch.jit.script(script_rotation)(torch.randn(3, 2, 8), torch.randn(2, 4))
    embeddings = torch.randn(3, 2, 8, requires_grad=True)
    with pytest.raises(Exception, match="a leaf Variable that requires grad"):
        torch.jit.script(script_rotation_in_place)(embeddings, torch.randn(3, 2, 4))
    with pytest.raises(Exception, match="Expected 4 dimensions for rope_freqs"):
        torch.jit.script(script_angles)(torch.randn(3, 2), torch.randn(2, 2, 4))
