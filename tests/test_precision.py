"""Accuracy of angles and results: all dtypes, large positions, and modes that must not matter."""

import contextlib
import math
import warnings

import mpmath
import numpy as np
import pytest
import torch
from strategies import (
    EMBEDDING_DTYPES,
    INTEGER_DTYPES,
    POSITION_DTYPES,
    assert_rotated,
    exact_array,
    exact_cos_sin,
    exact_rotation,
    half_ulp,
    name,
    pair_errors,
    random_embeddings,
    random_freqs,
    same_bits,
)

from nd_rotary_encodings import RoPEEncodingND, apply_rope, calculate_rope, rotate_embeddings

EPS32 = torch.finfo(torch.float32).eps


def rotate_ones(positions, freqs, dtype=torch.float32, **settings):
    """cos and sin of the angles, as (1, 0) rotated: [N, F, 2] for positions [N, P] and freqs [P, 1, F]."""
    pairs = freqs.shape[-1]
    x = torch.tensor([1.0, 0.0], dtype=dtype).repeat(pairs).expand(len(positions), 1, 2 * pairs)
    return apply_rope(x, positions, freqs, **settings).view(-1, pairs, 2)


def assert_exact(x, positions, freqs, **settings):
    y = apply_rope(x, positions, freqs, **settings)
    exact = exact_rotation(x, positions, freqs, **settings)
    assert_rotated(y, exact, freqs.shape[-1], settings.get("layout", "interleaved"))


def cos_sin_error(positions, freqs):
    results, (cos, sin) = exact_array(rotate_ones(positions, freqs)), exact_cos_sin(positions, freqs)
    return np.hypot(results[..., 0] - cos[:, 0], results[..., 1] - sin[:, 0]).max()


def gradients(x, positions, freqs, grad):
    """The result and dL/dx, dL/dpositions, dL/dfreqs of <y, grad>."""
    inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in (x, positions, freqs)]
    y = apply_rope(*inputs)
    return y.detach(), *torch.autograd.grad(y, [t for t in inputs if t.requires_grad], grad)


def same(results, others):
    return all(same_bits(a, b) for a, b in zip(results, others, strict=True))


# ---- dtypes of positions


@pytest.mark.parametrize("position", [257, 2049, 65537, 2**24 + 1])
@pytest.mark.parametrize("position_dtype", POSITION_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_positions_of_every_dtype_keep_their_own_precision(instruction_set, dtype, position_dtype, position):
    limits = torch.iinfo(position_dtype) if position_dtype in INTEGER_DTYPES else torch.finfo(position_dtype)
    positions = torch.tensor([[min(position, limits.max)]], dtype=torch.float64).to(position_dtype)
    freqs = random_freqs(1, 2, 9, torch.float32, seed=0)
    assert_exact(random_embeddings((3, 1, 2, 18), dtype, seed=1), positions, freqs)


WIDE_DTYPES = [torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float64]


@pytest.mark.parametrize("position", [257, 2049, 65537, 2**24 + 1, 2**31 - 1])
@pytest.mark.parametrize("position_dtype", WIDE_DTYPES, ids=name)
def test_neighboring_positions_differ_by_one_step(instruction_set, position_dtype, position):
    positions = torch.tensor([[position], [position - 1]], dtype=torch.float64).to(position_dtype)
    (c1, s1), (c0, s0) = rotate_ones(positions, torch.ones(1, 1, 1), torch.float64)[:, 0].tolist()
    assert math.atan2(s1 * c0 - c1 * s0, c1 * c0 + s1 * s0) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("position_dtype", "position", "stored"),
    [
        (torch.bfloat16, 257, 256),
        (torch.bfloat16, 4095, 4096),
        (torch.bfloat16, 65537, 65536),
        (torch.float16, 2049, 2048),
        (torch.float32, 2**24 + 1, 2**24),
    ],
)
def test_only_storing_a_position_rounds_it(position_dtype, position, stored):
    positions = torch.tensor([[position]], dtype=torch.float64).to(position_dtype)
    freqs = random_freqs(1, 1, 8, torch.float32, seed=0)
    assert same_bits(rotate_ones(positions, freqs), rotate_ones(torch.tensor([[stored]]), freqs))


ENDS = [
    (torch.int64, [2**53 - 1, 2**53, 2**53 + 1, 2**63 - 513, 2**63 - 1, -1 - 2**53, 1 - 2**63, -(2**63)]),
    (torch.uint64, [2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2049]),
]


@pytest.mark.parametrize("freq", [1.0, 0.3, 1e-9, -0.7, 3e4])
@pytest.mark.parametrize(("position_dtype", "positions"), ENDS, ids=["int64", "uint64"])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_the_largest_integers_are_exact(instruction_set, dtype, position_dtype, positions, freq):
    x = random_embeddings((len(positions), 1, 4), dtype, seed=1)
    positions = torch.tensor(positions, dtype=position_dtype)[:, None]
    for freq_dtype in (torch.float32, torch.float64):
        freqs = torch.full((1, 1, 2), freq, dtype=freq_dtype)
        y, exact = apply_rope(x, positions, freqs), exact_rotation(x, positions, freqs)
        if dtype == torch.float64:  # an angle of 1e19 is known to 1e-13
            assert pair_errors(y, exact, 2, "interleaved").max() < 1e-12
        else:
            assert_rotated(y, exact, 2, "interleaved")


@pytest.mark.parametrize("position_dtype", [torch.int64, torch.uint64], ids=name)
def test_the_largest_integers_of_two_axes_cancel(instruction_set, position_dtype):
    largest = torch.iinfo(position_dtype).max
    positions = torch.tensor([[largest, largest - 1]], dtype=position_dtype)
    c, s = rotate_ones(positions, torch.tensor([[[1.0]], [[-1.0]]]), torch.float64)[0, 0].tolist()
    assert (c, s) == pytest.approx((math.cos(1), math.sin(1)), abs=1e-15)


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_float32_positions_up_to_1e30_are_exact(instruction_set, dtype, layout):
    positions = torch.tensor([10.0**e * m for e in range(-5, 30) for m in (1.0, -3.7, 8.9)] + [1e30, -1e30])
    freqs = torch.tensor([1.0, 0.1, -0.57721, 1e-6]).view(1, 1, 4)
    x = random_embeddings((len(positions), 1, 8), dtype, seed=1)
    assert_exact(x, positions[:, None], freqs, layout=layout)


def test_large_positions_of_two_axes_are_summed_before_they_are_reduced(instruction_set):
    positions = torch.tensor([[1e30, 1e30], [3e9, -3e9], [1.5e6, -1.5e6], [1e20, 1.0]])
    freqs = torch.tensor([[[1.0, 0.3]], [[-1.0, -0.3]]])
    assert_exact(random_embeddings((4, 1, 4), torch.float32, seed=1), positions, freqs)
    assert same_bits(rotate_ones(positions[:1], freqs), torch.tensor([[[1.0, 0.0]] * 2]))


# ---- size of the error


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e2, 1e4, 1e6])
def test_float32_angles_up_to_a_million_are_within_1e_6(instruction_set, size, layout):
    freqs = torch.rand(1, 1, 40) * 0.9 + 0.1
    positions = (torch.rand(50, 1) * 2 - 1) * size / freqs.max()
    x = random_embeddings((50, 1, 80), torch.float32, seed=1)
    y, exact = (rotate(x, positions, freqs, layout=layout) for rotate in (apply_rope, exact_rotation))
    errors = pair_errors(y, exact, 40, layout)
    assert errors.max() < 1e-6
    assert errors.max() < 2.5 * EPS32  # what the kernels really do, measured: 1.9


@pytest.mark.parametrize("axes", [1, 2, 3, 5, 8])
def test_angles_of_many_axes_are_within_1e_6(instruction_set, axes):
    positions, freqs = torch.randn(40, axes) * 20, random_freqs(axes, 1, 40, torch.float32, seed=1)
    x = random_embeddings((40, 1, 80), torch.float32, seed=2)
    y, exact = apply_rope(x, positions, freqs), exact_rotation(x, positions, freqs)
    errors = pair_errors(y, exact, 40, "interleaved")
    assert errors.max() < 1e-6
    assert errors.max() < (2 + axes / 2) * EPS32  # what the kernels really do


def test_angles_next_to_multiples_of_a_quarter_turn_keep_their_accuracy(instruction_set):
    # where a reduction in float32 alone leaves nothing of the remainder
    turns = torch.cat((torch.arange(1, 200), torch.randint(200, 636_000, (300,))))
    positions = (turns.double() * (math.pi / 2)).float()[:, None]
    assert cos_sin_error(positions, torch.ones(1, 1, 1)) < 2 * EPS32


@pytest.mark.parametrize("limit", [2.0**20, 2.0**21, 2.0**22, 2.0**29, 2.0**30, 2.0**31])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_nothing_happens_where_the_range_reduction_changes(instruction_set, dtype, limit):
    limit = torch.tensor(limit)
    below, above = (torch.nextafter(limit, torch.tensor(to)) for to in (0.0, math.inf))
    positions = torch.stack((below, limit, above, -below, -limit, -above))[:, None]
    x = random_embeddings((6, 1, 16), dtype, seed=1)
    assert_exact(x, positions, torch.linspace(0.5, 1, 8).view(1, 1, 8))
    assert_exact(x, positions.double() + 0.001, torch.ones(1, 1, 8))


@pytest.mark.parametrize("position", [1.0, 2000.0, 131071.0])
def test_cos_and_sin_are_not_those_of_fast_math(instruction_set, position):
    # __sinf is off by 2e-4 at 2000 and by 1e-2 at 131071
    freqs = 10000.0 ** (-torch.arange(32) / 32)
    assert cos_sin_error(torch.tensor([[position]]), freqs.view(1, 1, 32)) < 2 * EPS32


@pytest.mark.parametrize("extent", [1e3, 1e4, 1e5, 1e6, 1e7])
def test_the_product_of_position_and_frequency_is_not_rounded(instruction_set, extent):
    # rounded to float32 it would be off by 3e-5 at 1e3 and by 0.5 at 1e7
    positions, freqs = torch.rand(60, 1) * extent, torch.linspace(0.1, 1, 20).view(1, 1, 20)
    assert cos_sin_error(positions, freqs) < 2 * EPS32


def test_float64_angles_keep_their_bits_at_a_large_base(instruction_set):
    positions = torch.tensor([[0.1], [1.7], [12345.678], [9.87654321e8], [1e15 / 3]], dtype=torch.float64)
    freqs = (5e5 ** (-torch.arange(16, dtype=torch.float64) / 16)).view(1, 1, 16)
    for layout in ("interleaved", "half"):
        assert_exact(random_embeddings((5, 1, 32), torch.float64, seed=1), positions, freqs, layout=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_a_long_sequence_at_a_large_base_is_rounded_once(instruction_set, dtype):
    freqs = (5e5 ** (-torch.arange(32) / 32)).view(1, 1, 32)
    x = random_embeddings((8192, 1, 64), dtype, seed=1)
    y = apply_rope(x, torch.arange(8192)[:, None], freqs)
    sample = torch.cat((torch.arange(0, 8192, 97), torch.tensor([8191])))
    exact = exact_rotation(x[sample], sample[:, None], freqs)
    assert_rotated(y[sample], exact, 32, "interleaved")


@pytest.mark.parametrize("freq_dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_frequencies_of_every_dtype_are_used_as_stored(instruction_set, dtype, freq_dtype):
    positions = torch.tensor([[0.5, 3.0], [100.25, -7.0], [2049.0, 65537.0]])
    freqs = random_freqs(2, 2, 9, freq_dtype, seed=0)
    assert_exact(random_embeddings((3, 2, 18), dtype, seed=1), positions, freqs)


# ---- dtypes of results


@pytest.mark.parametrize("freq_dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("position_dtype", POSITION_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_results_and_gradients_have_the_dtypes_of_their_inputs(dtype, position_dtype, freq_dtype):
    positions = torch.tensor([[1, 2], [3, 4]]).to(position_dtype)
    freqs = random_freqs(2, 3, 4, freq_dtype, seed=0)
    x = random_embeddings((2, 3, 8), dtype, seed=1)
    y, *grads = gradients(x, positions, freqs, torch.ones_like(x))
    differentiable = [t.dtype for t in (x, positions, freqs) if t.is_floating_point()]
    assert [grad.dtype for grad in grads] == differentiable
    assert y.dtype == dtype
    assert all(t.isfinite().all() for t in (y, *grads))


@pytest.mark.parametrize("freq_dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_gradient_of_embeddings_is_the_exact_inverse_rotation(instruction_set, dtype, freq_dtype):
    positions, freqs = torch.randn(5, 2) * 100, random_freqs(2, 2, 9, freq_dtype, seed=0)
    x, grad = (random_embeddings((5, 2, 18), dtype, seed) for seed in (1, 2))
    _, grad_x, *_ = gradients(x, positions, freqs, grad)
    assert_rotated(grad_x, exact_rotation(grad, positions, freqs, inverse=True), 9, "interleaved")


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)],
    ids=["float64", "float32", "float16", "bfloat16"],
)
def test_gradients_of_positions_and_frequencies_lose_only_the_rounding_of_the_output(
    instruction_set, dtype, tolerance
):
    positions = torch.randn(40, 2, dtype=torch.float64) * 30
    freqs = random_freqs(2, 2, 9, torch.float64, seed=0)
    x, grad = (random_embeddings((3, 40, 2, 18), dtype, seed) for seed in (1, 2))
    _, _, grad_positions, grad_freqs = gradients(x, positions, freqs, grad)
    y = exact_rotation(x, positions, freqs)
    g = exact_array(grad)
    per_angle = g[..., 1::2] * y[..., 0::2] - g[..., 0::2] * y[..., 1::2]
    exact_positions = np.einsum("bnhf,ahf->na", per_angle, exact_array(freqs))
    exact_freqs = np.einsum("bnhf,na->ahf", per_angle, exact_array(positions))
    for actual, exact in ((grad_positions, exact_positions), (grad_freqs, exact_freqs)):
        error = exact_array(actual) - exact
        assert np.sqrt((error**2).sum()) <= tolerance * np.sqrt((exact**2).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_a_module_in_half_precision_forms_its_angles_in_full(instruction_set, dtype):
    # in half precision the angle of position 1857 would be 1045 and not 1044.27, and its cos off by 0.78
    rope = RoPEEncodingND(1, 32, 1)
    with torch.no_grad():
        rope.freqs[0].copy_(10000.0 ** (-torch.arange(16) / 16))
    rope = rope.to(dtype)
    positions = torch.arange(0.0, 2048.0)[:, None]
    x = torch.ones(2048, 32, dtype=dtype)
    y = rope(x, positions).detach()
    sample = torch.cat((torch.arange(0, 2048, 31), torch.tensor([1857, 2047])))
    exact = exact_rotation(x[sample].view(-1, 1, 32), positions[sample], rope.freqs[0].detach())
    assert_rotated(y[sample].view(-1, 1, 32), exact, 16, "interleaved")
    assert np.abs(exact_array(y[sample].view(-1, 1, 32)) - exact).max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("position_dtype", [torch.int64, torch.float32], ids=name)
def test_a_module_in_bfloat16_rounds_its_frequencies_and_nothing_else(instruction_set, position_dtype):
    rope = RoPEEncodingND(2, 32, 2)
    rounded = rope.freqs[0].detach().to(torch.bfloat16)
    rope = rope.to(torch.bfloat16)
    assert same_bits(rope.freqs[0].detach(), rounded)
    positions = torch.tensor([[65537, 257], [65538, 4095], [8191, 8193]]).to(position_dtype)
    x = random_embeddings((3, 32), torch.float32, seed=1)
    y = rope(x, positions).detach().view(3, 2, 16)
    assert_rotated(y, exact_rotation(x.view(3, 2, 16), positions, rounded), 8, "interleaved")


@pytest.mark.parametrize("freq_dtype", EMBEDDING_DTYPES, ids=name)
def test_the_dtype_of_a_module_is_that_of_its_frequencies(instruction_set, freq_dtype):
    rope = RoPEEncodingND(1, 16, 1, dtype=freq_dtype)
    assert [parameter.dtype for parameter in rope.parameters()] == [freq_dtype]
    positions = torch.tensor([[4097], [65537]])
    x = random_embeddings((2, 16), torch.float32, seed=1)
    exact = exact_rotation(x.view(2, 1, 16), positions, rope.freqs[0].detach())
    assert_rotated(rope(x, positions).detach().view(2, 1, 16), exact, 8, "interleaved")


@pytest.mark.parametrize("position_dtype", [torch.float64, torch.float32, torch.int64], ids=name)
@pytest.mark.parametrize("freq_dtype", EMBEDDING_DTYPES, ids=name)
def test_angles_are_rounded_once_to_the_dtype_of_the_frequencies(freq_dtype, position_dtype):
    positions = (torch.randn(200, 1, dtype=torch.float64) * 1000).to(position_dtype)
    freqs = random_freqs(1, 1, 5, freq_dtype, seed=0)[:, None]
    angles = calculate_rope(positions, freqs)
    assert (angles.dtype, angles.shape) == (freq_dtype, (200, 1, 5))
    exact = exact_array(positions)[..., None] * exact_array(freqs)[0, 0]
    # the long double product is itself rounded, by half a thousandth of what float64 is
    assert (np.abs(exact_array(angles) - exact) <= 1.001 * half_ulp(exact, freq_dtype)).all()


@pytest.mark.parametrize("freq_dtype", [torch.float16, torch.bfloat16], ids=name)
def test_angles_just_beyond_half_a_unit_are_not_rounded_twice(freq_dtype):
    eps = torch.finfo(freq_dtype).eps
    positions = torch.tensor([[1 + eps / 2 + 2.0**-40]], dtype=torch.float64)
    assert calculate_rope(positions, torch.ones(1, 1, 1, 1, dtype=freq_dtype)).item() == 1 + eps


# ---- what is not finite


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_a_position_that_is_not_finite_spoils_its_own_token_only(instruction_set, dtype, value, layout):
    positions = torch.randn(40, 2) * 50
    x, freqs = random_embeddings((3, 40, 2, 18), dtype, seed=1), random_freqs(2, 2, 9, torch.float32, seed=2)
    clean = apply_rope(x, positions, freqs, layout=layout)
    positions[[0, 7, 39], [1, 0, 1]] = value
    spoiled = apply_rope(x, positions, freqs, layout=layout)
    others = torch.ones(40, dtype=torch.bool)
    others[[0, 7, 39]] = False
    assert same_bits(spoiled[:, others], clean[:, others])
    assert spoiled[:, ~others].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_position_that_is_not_finite_spoils_no_other_gradient(instruction_set, value):
    positions, freqs = torch.randn(40, 2), random_freqs(2, 2, 9, torch.float32, seed=2)
    x, grad = (random_embeddings((3, 40, 2, 18), torch.float32, seed) for seed in (1, 2))
    clean = gradients(x, positions, freqs, grad)
    positions[7, 1] = value
    spoiled = gradients(x, positions, freqs, grad)
    others = torch.arange(40) != 7
    assert same_bits(spoiled[1][:, others], clean[1][:, others])
    assert same_bits(spoiled[2][others], clean[2][others])
    assert spoiled[1][:, 7].isnan().all()
    assert spoiled[2][7].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_an_angle_that_is_not_finite_spoils_its_own_pair_only(instruction_set, dtype, value):
    angles = torch.randn(4, 3, 9)
    x = random_embeddings((4, 3, 18), dtype, seed=1)
    clean = rotate_embeddings(x, angles).unflatten(-1, (9, 2))
    spoiled_angles = torch.zeros(4, 3, 9, dtype=torch.bool)
    spoiled_angles[[0, 1, 1, 3], [0, 1, 1, 2], [3, 0, 7, 8]] = True
    spoiled = rotate_embeddings(x, torch.where(spoiled_angles, value, angles)).unflatten(-1, (9, 2))
    assert spoiled[spoiled_angles].isnan().all()
    # the other angles of such a token may be reduced in another way, to other bits
    others, tolerance = ~spoiled_angles, 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(spoiled[others], clean[others], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_an_embedding_that_is_not_finite_spoils_its_own_pair_only(instruction_set, dtype):
    x, positions = random_embeddings((5, 2, 18), dtype, seed=1), torch.arange(5)[:, None]
    freqs = random_freqs(1, 2, 9, torch.float32, seed=2)
    clean = apply_rope(x, positions, freqs)
    x[1, 0, 4], x[2, 1, 17] = math.nan, math.inf
    spoiled = apply_rope(x, positions, freqs)
    finite = torch.ones_like(x, dtype=torch.bool)
    finite[1, 0, 4:6] = finite[2, 1, 16:18] = False
    assert same_bits(spoiled[finite], clean[finite])
    assert not spoiled[~finite].isfinite().any()


# ---- modes of PyTorch


@pytest.fixture
def restored_modes():
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


def problem():
    """Positions that reduced precision can't tell from their neighbors."""
    torch.manual_seed(1)
    positions = torch.tensor([2047.0, 2049.0, 4099.0, 8195.0]).expand(2, 4)[..., None].clone()
    return torch.randn(2, 4, 2, 8), positions, torch.ones(1, 2, 4), torch.randn(2, 4, 2, 8)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_precision_of_matrix_products_changes_nothing(restored_modes, precision):
    torch.set_float32_matmul_precision("highest")
    expected = gradients(*problem())
    torch.set_float32_matmul_precision(precision)
    assert same(gradients(*problem()), expected)
    x, positions, freqs, _ = problem()
    assert_exact(x, positions, freqs)


@contextlib.contextmanager
def broken_matrix_products():
    """Replaces every matrix product of PyTorch on the CPU by ones."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        for product in ("mm", "bmm"):
            library.impl(product, lambda a, b: a.new_ones(*a.shape[:-1], b.shape[-1]), "CPU")
        for product in ("addmm", "baddbmm"):
            library.impl(product, lambda c, a, b, **_: a.new_ones(*a.shape[:-1], b.shape[-1]), "CPU")
        library.impl("dot", lambda a, b: a.new_ones(()), "CPU")
        library.impl("mv", lambda a, b: a.new_ones(a.shape[0]), "CPU")
    try:
        assert (torch.full((2, 2), 5.0) @ torch.full((2, 2), 5.0) == 1).all()
        yield
    finally:
        library._destroy()


def test_matrix_products_replaced_by_a_library_change_nothing():
    x, positions, freqs, grad = problem()
    rope = RoPEEncodingND(2, 32, 2)
    query, query_pos = torch.randn(2, 3, 32), torch.randint(0, 9, (2, 3, 2))

    def results():
        angles = calculate_rope(positions, freqs[:, None])
        return *gradients(x, positions, freqs, grad), angles, rope(query, query_pos).detach()

    expected = results()
    with broken_matrix_products():
        assert same(results(), expected)
    assert torch.full((2, 2), 5.0).mm(torch.full((2, 2), 5.0))[0, 0] == 50


@pytest.mark.parametrize("position_dtype", [torch.int64, torch.float32], ids=name)
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("use_checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_autocast_changes_nothing(position_dtype, autocast_dtype, use_checkpointing):
    # bfloat16 steps by 512 at 65536: a whole 8 x 8 image would have one position
    rope = RoPEEncodingND(2, 32, 2, use_checkpointing=use_checkpointing)
    positions = (RoPEEncodingND.position_grid((1, 8, 8, 32)) + 65536).to(position_dtype)
    x, grad = torch.ones(1, 8, 8, 32), torch.randn(1, 8, 8, 32)

    def results():
        query, pos = x.clone().requires_grad_(), positions.clone()
        pos.requires_grad_(pos.is_floating_point())
        y = rope(query, pos)
        leaves = [t for t in (query, pos, *rope.freqs) if t.requires_grad]
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    expected = results()
    with torch.autocast("cpu", autocast_dtype):
        actual = results()
        angles = calculate_rope(positions, rope.freqs[0].detach()[:, None])
    assert same(actual, expected)
    assert len(actual[0].view(64, 32).unique(dim=0)) == 64
    assert len(angles.view(64, -1).unique(dim=0)) == 64
    assert same_bits(angles, calculate_rope(positions, rope.freqs[0].detach()[:, None]))


@pytest.mark.parametrize("default_dtype", [torch.float16, torch.bfloat16, torch.float64], ids=name)
def test_the_default_dtype_changes_nothing(restored_modes, default_dtype):
    expected, (x, positions, freqs, grad) = gradients(*problem()), problem()
    angles = calculate_rope(positions, freqs[:, None])
    torch.set_default_dtype(default_dtype)
    assert same(gradients(x, positions, freqs, grad), expected)
    assert same_bits(calculate_rope(positions, freqs[:, None]), angles)


def test_exact_results_agree_with_mpmath_beyond_the_fast_path():
    stored = int(np.float32(1e30))
    with mpmath.workdps(80):
        expected = [float(mpmath.cos(stored)), float(mpmath.sin(stored))]
    result = rotate_ones(torch.tensor([[1e30]]), torch.ones(1, 1, 1), torch.float64)[0, 0].tolist()
    assert result == pytest.approx(expected, abs=1e-15)
