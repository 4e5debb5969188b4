"""The tests' own tools: calls are drawn as they say, and exact results agree with numbers from elsewhere."""

import cmath
import functools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from strategies import (
    BUDGET,
    EMBEDDING_DTYPES,
    HALF_DIMS,
    INTEGER_DTYPES,
    MEMORY_KINDS,
    POSITION_DTYPES,
    assert_rotated,
    calls,
    exact_cos_sin,
    exact_rotation,
    half_ulp,
    in_memory,
    name,
    pair_channels,
    pair_errors,
    poison,
    random_embeddings,
    random_positions,
    same_bits,
    whole_storage,
)

# for values of shape (3, 4, 5): strides, offset, elements of the storage
MEMORY = {
    "contiguous": ((20, 5, 1), 0, 60),
    "transposed": ((5, 15, 1), 0, 60),
    "qkv_slice": ((60, 5, 1), 20, 180),
    "columns": ((36, 9, 1), 1, 108),
    "step_2": ((40, 5, 1), 0, 120),
    "channel_step_2": ((40, 10, 2), 0, 120),
    "reversed_dims": ((1, 3, 12), 0, 60),
    "expanded": ((0, 5, 1), 0, 60),
    "flipped": ((20, 5, 1), 0, 60),
    "odd_offset": ((20, 5, 1), 1, 61),
}


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_memory_is_laid_out_as_named(kind):
    tensor = in_memory(torch.arange(60.0).view(3, 4, 5), kind)
    elements = tensor.untyped_storage().nbytes() // 4
    assert (tensor.stride(), tensor.storage_offset(), elements) == MEMORY[kind]


@pytest.mark.parametrize("kind", MEMORY_KINDS)
@pytest.mark.parametrize("dtype", POSITION_DTYPES, ids=name)
def test_memory_holds_the_values_amid_poison(kind, dtype):
    values = torch.arange(60).view(3, 4, 5).to(dtype)
    tensor = in_memory(values, kind)
    expected = {
        "expanded": torch.stack([values[0]] * 3),
        "flipped": torch.stack([values[2], values[1], values[0]]),
    }
    assert same_bits(tensor, expected.get(kind, values))
    if kind != "expanded":
        tensor[...] = 0
        rest = whole_storage(tensor).view(dtype)
        rest = rest[rest != 0]
        assert len(rest) == MEMORY[kind][2] - 60
        assert same_bits(rest, poison(rest.shape, dtype))


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (0, 2), (0, 2, 3), (2, 3, 0), (1, 2, 1, 2, 1)])
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_memory_of_any_shape_is_possible(kind, shape):
    for dtype in POSITION_DTYPES:
        assert in_memory(torch.zeros(shape, dtype=dtype), kind).shape == shape


def _one_rotated_token_after_a_prefix(call):
    return call.settings["num_prefix_tokens"] > 1 and call.lead[-1] == 1 and call.x.numel() > 0


def _values(call):
    return call.x.double().abs()[call.x != 0]


PREDICATES = {
    "empty": lambda call: call.x.numel() == 0,
    "rank 2": lambda call: call.x.ndim == 2,
    "rank 5": lambda call: call.x.ndim == 5 and call.x.numel() > 0,
    "x is broadcast": lambda call: not call.full_shape and call.x.numel() > 0,
    "positions have more dims": lambda call: call.positions.ndim - 1 > len(call.lead),
    "positions have fewer dims": lambda call: call.positions.ndim - 1 < len(call.lead),
    "tokens share a position": lambda call: call.lead[-1:] > (1,) and call.positions.shape[-2:-1] == (1,),
    "no broadcasting": lambda call: call.full_shape and call.positions.shape[:-1] == call.lead != (),
    "one token after a prefix": _one_rotated_token_after_a_prefix,
    "frequencies of each head": lambda call: call.freqs.shape[1] > 1,
    "frequencies of all heads": lambda call: call.freqs.shape[1] == 1 < call.x.shape[-2],
    "four axes": lambda call: call.freqs.shape[0] == 4,
    "half": lambda call: call.settings["layout"] == "half",
    "blocks": lambda call: call.settings["layout"] in range(4, call.freqs.shape[-1] + 1),
    "offset": lambda call: call.settings["rotary_offset"] == 3,
    "channels after the rotated ones": lambda call: (
        call.x.shape[-1] > 2 * call.freqs.shape[-1] + call.settings["rotary_offset"]
    ),
    "heads first": lambda call: call.settings["head_dim_first"] and call.x.shape[-3] != call.x.shape[-2],
    "inverse": lambda call: call.settings["inverse"],
    "negative zero": lambda call: bool(((call.x == 0) & call.x.double().signbit()).any()),
    "subnormal": lambda call: bool((_values(call) < torch.finfo(call.x.dtype).smallest_normal).any()),
    "huge": lambda call: bool((_values(call) > torch.finfo(call.x.dtype).max / 5).any()),
    "large positions": lambda call: bool((call.positions.double().abs() > 500).any()),
}


@functools.cache
def sample():
    """Calls as Hypothesis draws them for a test."""
    drawn = []

    @settings(max_examples=1000, derandomize=True, phases=[Phase.generate])
    @given(calls())
    def collect(call):
        drawn.append(call)

    collect()
    return drawn


@pytest.mark.parametrize("wanted", PREDICATES)
def test_calls_of_each_sort_are_drawn(wanted):
    assert sum(PREDICATES[wanted](call) for call in sample()) >= 10


@pytest.mark.parametrize("operand", ["x", "positions", "freqs"])
def test_calls_of_each_memory_kind_are_drawn(operand):
    assert {getattr(call, f"{operand}_memory") for call in sample()} == set(MEMORY_KINDS)


@pytest.mark.parametrize(
    ("operand", "dtypes"),
    [("x", EMBEDDING_DTYPES), ("positions", POSITION_DTYPES), ("freqs", EMBEDDING_DTYPES)],
    ids=["x", "positions", "freqs"],
)
def test_calls_of_each_dtype_are_drawn(operand, dtypes):
    assert {getattr(call, operand).dtype for call in sample()} == set(dtypes)


def test_calls_of_each_half_dim_are_drawn():
    assert {call.freqs.shape[-1] for call in sample()} == set(HALF_DIMS)


@given(calls())
def test_a_call_has_full_shape_where_the_result_is_as_large_as_x(call):
    result = call(exact_rotation).shape
    assert call.full_shape == (result == tuple(call.x.shape))


@given(calls(broadcast_x=False))
def test_x_is_not_broadcast_on_request(call):
    assert call.full_shape


def test_random_embeddings_are_plain_or_special():
    plain = random_embeddings((100, 100), torch.float32, 0)
    special = random_embeddings((100, 100), torch.float32, 0, special=True)
    assert abs(plain.mean().item()) < 0.05
    assert abs(plain.std().item() - 1) < 0.05
    assert 0.2 < (special != plain).float().mean() < 0.4
    assert special.isfinite().all()


@pytest.mark.parametrize("dtype", POSITION_DTYPES, ids=name)
def test_random_positions_fill_their_extent_and_some_are_zero(dtype):
    positions = random_positions((1000,), dtype, 100.0, 0).double()
    assert 95 <= positions.abs().max() <= 100
    assert 0.1 < (positions == 0).double().mean() < 0.7
    assert (positions < 0).any() == (dtype not in INTEGER_DTYPES or torch.iinfo(dtype).min < 0)


def test_cos_and_sin_of_large_angles_are_those_of_the_literature():
    # sin(1e22): W. Kahan's and K. C. Ng's example for argument reduction
    cos, sin = exact_cos_sin(torch.tensor([[1e22]], dtype=torch.float64), torch.ones(1, 1, 1))
    assert abs(sin.item() - -0.8522008497671888) < 1e-16
    assert abs(cos.item() - 0.5232147853951389) < 1e-16


def test_angles_sum_over_axes_in_the_order_of_the_dims():
    positions = torch.tensor([[[1.0, 10.0], [2.0, 20.0]]])
    freqs = torch.tensor([[[0.1, 0.2], [0.3, 0.4]], [[0.01, 0.02], [0.03, 0.04]]], dtype=torch.float64)
    cos, sin = exact_cos_sin(positions, freqs)
    angles = [[[0.2, 0.4], [0.6, 0.8]], [[0.4, 0.8], [1.2, 1.6]]]
    np.testing.assert_allclose(np.arctan2(sin, cos)[0].astype(float), angles, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=name)
def test_cos_and_sin_of_the_largest_integers_lose_no_bit(dtype):
    largest = torch.iinfo(dtype).max
    cos, sin = exact_cos_sin(torch.tensor([[largest]], dtype=dtype), torch.tensor([[[0.5]]]))
    with mpmath.workdps(60):
        expected = mpmath.expj(mpmath.mpf(largest) / 2)
        assert abs(expected - mpmath.mpc(float(cos.item()), float(sin.item()))) < 1e-15


@pytest.mark.parametrize(
    ("layout", "offset", "first", "second"),
    [
        ("interleaved", 0, [0, 2, 4, 6], [1, 3, 5, 7]),
        (2, 0, [0, 2, 4, 6], [1, 3, 5, 7]),
        ("half", 0, [0, 1, 2, 3], [4, 5, 6, 7]),
        (8, 0, [0, 1, 2, 3], [4, 5, 6, 7]),
        (4, 0, [0, 1, 4, 5], [2, 3, 6, 7]),
        (4, 3, [3, 4, 7, 8], [5, 6, 9, 10]),
    ],
)
def test_pairs_are_the_channels_of_the_definition(layout, offset, first, second):
    channels = pair_channels(4, layout, offset)
    assert [channel.tolist() for channel in channels] == [first, second]


def test_the_exact_rotation_is_a_product_of_complex_numbers():
    x, positions, freqs = torch.randn(2, 3, 2, 8), torch.randn(3, 2), torch.randn(2, 1, 3)
    y = exact_rotation(x, positions, freqs, rotary_offset=1, layout="half")
    for b, n, h, i in np.ndindex(2, 3, 2, 3):
        angle = sum(positions[n, a].item() * freqs[a, 0, i].item() for a in range(2))
        turned = complex(x[b, n, h, 1 + i], x[b, n, h, 4 + i]) * cmath.exp(1j * angle)
        assert abs(turned - complex(y[b, n, h, 1 + i], y[b, n, h, 4 + i])) < 1e-15
    for channel in (0, 7):
        assert (y[..., channel] == x[..., channel].numpy()).all()


def test_the_exact_rotation_knows_prefix_tokens_head_order_and_direction():
    x, positions, freqs = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 1), torch.randn(1, 3, 2)
    plain = exact_rotation(x[:, 2:], positions, freqs)
    prefixed = exact_rotation(x, positions, freqs, num_prefix_tokens=2)
    assert (prefixed[:, 2:] == plain).all()
    assert (prefixed[:, :2] == x[:, :2].numpy()).all()
    swapped = exact_rotation(x.transpose(1, 2), positions, freqs, num_prefix_tokens=2, head_dim_first=True)
    assert (swapped == np.swapaxes(prefixed, 1, 2)).all()
    back = exact_rotation(x[:, 2:], -positions, freqs)
    np.testing.assert_array_equal(exact_rotation(x[:, 2:], positions, freqs, inverse=True), back)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (torch.float16, 1.0, 2.0**-11),
        (torch.float16, 65504.0, 16.0),
        (torch.float16, 0.999, 2.0**-12),
        (torch.float16, 1e-7, 2.0**-25),
        (torch.bfloat16, 1.0, 2.0**-8),
        (torch.bfloat16, 256.0, 1.0),
    ],
)
def test_half_an_ulp_is_half_the_distance_of_neighbors(dtype, value, expected):
    assert half_ulp(np.array([value, -value], dtype=np.longdouble), dtype).tolist() == [expected] * 2


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("channel", [0, 3])
def test_a_result_off_by_a_few_units_is_noticed(dtype, channel):
    x = torch.tensor([[[1.0, 0.5, 0.3, 1.0]]], dtype=dtype)
    exact = exact_rotation(x, torch.zeros(1, 1), torch.ones(1, 1, 2))
    assert_rotated(x, exact, 2, "interleaved")
    x[..., channel] += 1.5 * BUDGET.get(dtype, 1) * torch.finfo(dtype).eps
    with pytest.raises(AssertionError):
        assert_rotated(x, exact, 2, "interleaved")


def test_errors_are_in_units_of_the_norm_of_the_pair():
    exact = np.array([[3.0, 4.0, 0.0, 0.0, 0.0, 0.0]], dtype=np.longdouble)
    errors = pair_errors(torch.tensor([[3.0, 4.5, 0.0, 1.0, 0.0, 0.0]]), exact, 3, "interleaved")
    np.testing.assert_allclose(errors.astype(float), [[0.1, math.inf, 0.0]], rtol=1e-15)


def test_same_bits_tells_zeros_apart_and_a_nan_equals_itself():
    assert same_bits(torch.tensor([0.0, math.nan]), torch.tensor([0.0, math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([0.0]).double())
    assert not same_bits(torch.zeros(2), torch.zeros(1))
