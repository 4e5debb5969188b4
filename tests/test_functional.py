"""The functions: angles, rotation by given angles, their explicit gradients, the options of apply_rope."""

import itertools
import math

import numpy as np
import pytest
import torch

from nd_rotary_encodings import (
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    calculate_rope_backward,
    rotate_embeddings,
    rotate_embeddings_backward,
)

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float64, torch.float32, *HALF_TYPES)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


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


# ---- apply_rope: which channels, which tokens


def rotated_by_loops(x, positions, freqs, pairs_of_channels, inverse=False):
    """Of `[N, H, D]`, one number after the other, for a list of (pair, first channel, second channel)."""
    y = x.tolist()
    for n, position in enumerate(positions.tolist()):
        for h in range(x.shape[1]):
            for pair, first, second in pairs_of_channels:
                angle = sum(p * freqs[a, h % freqs.shape[1], pair].item() for a, p in enumerate(position))
                angle = -angle if inverse else angle
                x0, x1 = x[n, h, first].item(), x[n, h, second].item()
                y[n][h][first] = x0 * math.cos(angle) - x1 * math.sin(angle)
                y[n][h][second] = x0 * math.sin(angle) + x1 * math.cos(angle)
    return torch.tensor(y, dtype=torch.float64)


def pairs_in_blocks(pairs, block, offset):
    half, found = block // 2, []
    for i in range(pairs):
        start = offset + i // half * block
        found.append((i, start + i % half, start + half + i % half))
    return found


@pytest.mark.parametrize(
    ("layout", "block"), [("interleaved", 2), ("half", 12), (2, 2), (4, 4), (6, 6), (12, 12)], ids=str
)
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("freq_heads", [1, 2])
@pytest.mark.parametrize("inverse", [False, True])
def test_pairs_of_channels_of_each_layout(layout, block, offset, freq_heads, inverse):
    x, positions, freqs = double(3, 2, 17), double(3, 2) * 5, double(2, freq_heads, 6)
    expected = rotated_by_loops(x, positions, freqs, pairs_in_blocks(6, block, offset), inverse)
    actual = apply_rope(x, positions, freqs, layout=layout, rotary_offset=offset, inverse=inverse)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_known_pairs():
    """A quarter turn of pair 0 and a half turn of pair 1."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    positions, freqs = torch.tensor([[1]]), torch.tensor([[[math.pi / 2, math.pi]]])
    interleaved, half = apply_rope(x, positions, freqs), apply_rope(x, positions, freqs, layout="half")
    assert interleaved[0, 0].tolist() == pytest.approx([-2, 1, -3, -4], abs=1e-6)
    assert half[0, 0].tolist() == pytest.approx([-3, -2, 1, -4], abs=1e-6)


def test_interleaved_is_half_split_under_a_permutation_of_the_channels():
    x, positions, freqs = torch.randn(5, 2, 16), torch.randn(5, 2) * 5, torch.randn(2, 2, 8)
    evens_first = [*range(0, 16, 2), *range(1, 16, 2)]
    half = apply_rope(x[..., evens_first], positions, freqs, layout="half")
    torch.testing.assert_close(apply_rope(x, positions, freqs)[..., evens_first], half, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_channels_outside_the_rotary_range_are_copied_bit_for_bit(layout, dtype):
    x = torch.randn(5, 2, 11).to(dtype)
    x[0, 0, 0], x[1, 1, 10], x[2, 0, 1] = math.nan, math.inf, -0.0
    y = apply_rope(x, torch.randn(5, 2), torch.randn(2, 2, 3), layout=layout, rotary_offset=2)
    for channels in (slice(0, 2), slice(8, 11)):
        assert torch.equal(y[..., channels].view(torch.uint8), x[..., channels].view(torch.uint8))
    assert not torch.equal(y[..., 2:8], x[..., 2:8])


def test_no_frequencies_make_a_copy():
    x = torch.randn(5, 2, 8)
    for layout in ("interleaved", "half", 4):
        y = apply_rope(x, torch.randn(5, 2), torch.randn(2, 1, 0), layout=layout)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("head_dim_first", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 3, 5])
def test_prefix_tokens_are_copied_and_the_others_rotated_by_their_positions(prefix, head_dim_first):
    x, positions, freqs = torch.randn(2, 5, 3, 8), torch.randn(5 - prefix, 2), torch.randn(2, 3, 4)
    x[0, 0, 0, 0] = math.nan if prefix else 1.0
    expected = torch.cat([x[:, :prefix], apply_rope(x[:, prefix:], positions, freqs)], dim=1)
    if head_dim_first:
        x = x.transpose(1, 2).contiguous()
    y = apply_rope(x, positions, freqs, num_prefix_tokens=prefix, head_dim_first=head_dim_first)
    if head_dim_first:
        y = y.transpose(1, 2)
    assert torch.equal(y.reshape(expected.shape).view(torch.int32), expected.view(torch.int32))


def test_prefix_tokens_of_a_broadcast_batch_are_copied_to_each_entry():
    x, positions, freqs = torch.randn(1, 4, 2, 8), torch.randn(3, 3, 2), torch.randn(2, 2, 4)
    y = apply_rope(x, positions, freqs, num_prefix_tokens=1)
    assert y.shape == (3, 4, 2, 8)
    assert torch.equal(y[:, :1], x[:, :1].expand(3, 1, 2, 8))
    assert torch.equal(y[:, 1:], apply_rope(x[:, 1:], positions, freqs))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_heads_before_tokens_are_a_transposition(layout):
    x, positions, freqs = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 2), torch.randn(2, 3, 4)
    expected = apply_rope(x, positions, freqs, layout=layout)
    for heads_first in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
        actual = apply_rope(heads_first, positions, freqs, layout=layout, head_dim_first=True)
        assert torch.equal(actual, expected.transpose(1, 2))


def test_equal_numbers_of_batch_tokens_and_heads_are_not_confused():
    x, positions, freqs = double(3, 3, 3, 4), double(3, 3, 2), double(2, 3, 2)
    expected = [rotated_by_loops(x[b], positions[b], freqs, pairs_in_blocks(2, 2, 0)) for b in range(3)]
    torch.testing.assert_close(apply_rope(x, positions, freqs), torch.stack(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["interleaved", "half", 4])
def test_inverse_undoes_the_rotation_and_is_that_of_negative_positions(layout):
    x, positions, freqs = double(5, 2, 8), double(5, 2) * 5, double(2, 2, 4)
    y = apply_rope(x, positions, freqs, layout=layout)
    torch.testing.assert_close(
        apply_rope(y, positions, freqs, layout=layout, inverse=True), x, rtol=0, atol=1e-13
    )
    backward = apply_rope(x, positions, freqs, layout=layout, inverse=True)
    assert torch.equal(backward, apply_rope(x, -positions, freqs, layout=layout))


def test_scores_depend_on_differences_of_positions_only():
    query, key, freqs = double(1, 4, 8), double(1, 4, 8), double(3, 4, 4)
    p, s, shift = double(1, 3) * 5, double(1, 3) * 5, double(1, 3) * 50
    scores = [(apply_rope(query, p + d, freqs) * apply_rope(key, s + d, freqs)).sum(-1) for d in (0, shift)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-12)


def test_permuted_tokens_give_permuted_results():
    x, positions, freqs = torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2), torch.randn(2, 2, 4)
    order = torch.randperm(7)
    expected = apply_rope(x, positions, freqs)[:, order]
    assert torch.equal(apply_rope(x[:, order], positions[:, order], freqs), expected)


def test_options_are_keywords_only():
    x, positions, freqs = torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(2, 2, 4)
    for function in (apply_rope, apply_rope_, apply_rope_qkv_):
        with pytest.raises(TypeError, match="positional"):
            function(x, positions, freqs, "half")


def test_results_have_memory_of_their_own():
    """Also where nothing is rotated, and where a batch shares one query."""
    for positions in (torch.zeros(5, 2), torch.zeros(3, 5, 2)):
        x = torch.randn(1, 5, 2, 8)
        y = apply_rope(x, positions, torch.randn(2, 2, 4))
        before = x.clone()
        y.fill_(1)
        assert torch.equal(x, before)
        assert torch.equal(y, torch.ones_like(y))


# ---- in place


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "half", "rotary_offset": 1},
        {"num_prefix_tokens": 2},
        {"head_dim_first": True, "num_prefix_tokens": 1},
        {"inverse": True, "layout": 4},
    ],
    ids=str,
)
def test_in_place_is_out_of_place_written_into_x(options, dtype):
    tokens = 5 - options.get("num_prefix_tokens", 0)
    buffer = torch.full((4, 5, 5, 20), math.nan, dtype=dtype)
    x = buffer[1:3, :, :, 3:12]
    x.copy_(torch.randn(2, 5, 5, 9))
    positions, freqs = torch.randn(tokens, 2), torch.randn(2, 5, 4)
    expected, version = apply_rope(x, positions, freqs, **options), x._version
    assert apply_rope_(x, positions, freqs, **options) is x
    assert torch.equal(x, expected)
    assert x._version > version
    assert buffer.isnan().sum() == buffer.numel() - x.numel()


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"layout": "half"}, {"rotary_offset": 1, "inverse": True}], ids=str)
def test_packed_projection_rotates_queries_and_keys_and_leaves_values(options, dtype):
    packed = torch.randn(2, 5, 3 * 4 * 9).to(dtype)
    qkv, positions, freqs = packed.view(2, 5, 3, 4, 9), torch.randn(5, 2), torch.randn(2, 4, 4)
    qkv[:, :, 2, 0, 0] = math.nan
    before, version = qkv.clone(), packed._version
    assert apply_rope_qkv_(qkv, positions, freqs, **options) is qkv
    for i in (0, 1):
        assert torch.equal(qkv[:, :, i], apply_rope(before[:, :, i], positions, freqs, **options))
    assert torch.equal(
        qkv[:, :, 2].contiguous().view(torch.uint8), before[:, :, 2].contiguous().view(torch.uint8)
    )
    assert packed._version > version


def test_packed_projection_with_heads_before_tokens_and_a_prefix():
    qkv, positions, freqs = torch.randn(2, 3, 4, 6, 8), torch.randn(2, 5, 2), torch.randn(2, 1, 4)
    before = qkv.clone()
    apply_rope_qkv_(qkv, positions, freqs, head_dim_first=True, num_prefix_tokens=1)
    for i in (0, 1):
        expected = apply_rope(before[:, i], positions, freqs, head_dim_first=True, num_prefix_tokens=1)
        assert torch.equal(qkv[:, i], expected)
    assert torch.equal(qkv[:, 2], before[:, 2])


def test_packed_projection_of_any_strides():
    buffer = torch.full((5, 2, 4, 3, 16), math.nan)
    qkv = buffer.permute(1, 0, 3, 2, 4)[..., ::2]
    qkv.copy_(torch.randn(2, 5, 3, 4, 8))
    positions, freqs, before = torch.randn(2, 5, 2), torch.randn(2, 4, 4), qkv.clone()
    apply_rope_qkv_(qkv, positions, freqs)
    assert torch.equal(qkv[:, :, 1], apply_rope(before[:, :, 1], positions, freqs))
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    assert buffer.isnan().sum() == buffer.numel() // 2


def test_packed_projection_without_a_batch_dim():
    qkv, positions, freqs = torch.randn(5, 3, 2, 8), torch.randn(5, 2), torch.randn(2, 2, 4)
    before = qkv.clone()
    apply_rope_qkv_(qkv, positions, freqs)
    assert torch.equal(qkv[:, 0], apply_rope(before[:, 0], positions, freqs))
    assert torch.equal(qkv[:, 1], apply_rope(before[:, 1], positions, freqs))
    assert torch.equal(qkv[:, 2], before[:, 2])
