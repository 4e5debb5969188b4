"""Forward rotation: exact values, and the properties that make it a rotary embedding."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    EMBEDDING_DTYPES,
    HALF_DIMS,
    MEMORY_KINDS,
    POSITION_DTYPES,
    assert_rotated,
    calls,
    exact_array,
    exact_cos_sin,
    exact_rotation,
    in_memory,
    layouts,
    name,
    pair_channels,
    pair_errors,
    random_embeddings,
    random_freqs,
    random_positions,
    same_bits,
    whole_storage,
)

from nd_rotary_encodings import (
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    reference,
    rotate_embeddings,
)

DISTINCT_MEMORY_KINDS = tuple(kind for kind in MEMORY_KINDS if kind != "expanded")
DENSE_MEMORY_KINDS = ("contiguous", "transposed", "reversed_dims", "odd_offset")
SOME_HALF_DIMS = (1, 3, 8, 17, 64)


@functools.cache
def operands(pairs, heads=2):
    """Positions [3, 2], frequencies, and cos and sin of their angles, which are too slow to compute often."""
    positions = random_positions((3, 2), torch.float32, 50.0, seed=pairs)
    freqs = random_freqs(2, heads, pairs, torch.float32, seed=pairs + 1)
    return positions, freqs, exact_cos_sin(positions, freqs)


# ---- exact values


@pytest.mark.parametrize("memory", MEMORY_KINDS)
@pytest.mark.parametrize("pairs", HALF_DIMS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_result_is_the_exact_rotation(instruction_set, dtype, pairs, memory):
    positions, freqs, cos_sin = operands(pairs)
    x = in_memory(random_embeddings((2, 3, 2, 2 * pairs), dtype, seed=pairs + 2), memory)
    for layout in ("interleaved", "half"):
        exact = exact_rotation(x, positions, freqs, layout=layout, cos_sin=cos_sin)
        assert_rotated(apply_rope(x, positions, freqs, layout=layout), exact, pairs, layout)


@given(call=calls())
def test_result_of_any_call_is_the_exact_rotation(instruction_set, call):
    layout, offset = call.settings["layout"], call.settings["rotary_offset"]
    assert_rotated(call(apply_rope), call(exact_rotation), call.freqs.shape[-1], layout, offset)


@given(call=calls(half_dims=(1, 3, 8, 17)))
def test_other_channels_and_prefix_tokens_are_copied(instruction_set, call):
    y, x = call(apply_rope), call.x
    if call.settings["head_dim_first"]:
        y, x = y.transpose(-3, -2), x.transpose(-3, -2)
    offset, prefix = call.settings["rotary_offset"], call.settings["num_prefix_tokens"]
    last = offset + 2 * call.freqs.shape[-1]
    if prefix:
        before, after = y[..., :prefix, :, :], x[..., :prefix, :, :]
        assert same_bits(before, after.expand(before.shape))
        y, x = y[..., prefix:, :, :], x[..., prefix:, :, :]
    x = x.expand(y.shape)
    assert same_bits(y[..., :offset], x[..., :offset])
    assert same_bits(y[..., last:], x[..., last:])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("prefix", [1, 2, 3])
@pytest.mark.parametrize("head_dim_first", [False, True], ids=["tokens_first", "heads_first"])
def test_prefix_tokens_are_copied_however_few_tokens_follow(prefix, tokens, head_dim_first):
    x = torch.randn(2, prefix + tokens, 3, 4)
    x[0, 0, 0, 0] = math.nan
    arranged = x.transpose(1, 2).contiguous() if head_dim_first else x
    y = apply_rope(
        arranged,
        torch.randn(2, tokens, 1),
        torch.ones(1, 1, 2),
        num_prefix_tokens=prefix,
        head_dim_first=head_dim_first,
    )
    assert same_bits((y.transpose(1, 2) if head_dim_first else y)[:, :prefix], x[:, :prefix])


@pytest.mark.parametrize("function", [apply_rope, reference.apply_rope], ids=["kernel", "reference"])
def test_a_token_alone_after_a_prefix_is_broadcast(function):
    x, positions, freqs = torch.randn(3, 2, 4), torch.arange(5)[:, None], torch.ones(1, 1, 2)
    y = function(x, positions, freqs, num_prefix_tokens=2)
    assert same_bits(y[:2], x[:2])
    torch.testing.assert_close(y[2:], function(x[2:], positions, freqs), rtol=0, atol=0)


def test_gradients_of_a_broadcast_token_after_a_prefix_are_summed():
    x, positions, freqs = torch.randn(3, 2, 4).requires_grad_(), torch.arange(5)[:, None], torch.ones(1, 1, 2)
    apply_rope(x, positions, freqs, num_prefix_tokens=2).sum().backward()
    grad = x.grad
    assert (grad[:2] == 1).all()
    (expected,) = torch.autograd.grad(apply_rope(x[2:], positions, freqs).sum(), x)
    torch.testing.assert_close(grad[2:], expected[2:])


@pytest.mark.parametrize("pairs", HALF_DIMS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_rotation_by_given_angles_is_exact(instruction_set, dtype, pairs):
    angles = torch.randn(2, 3, 2, pairs, dtype=torch.float64) * 10
    cos_sin = exact_cos_sin(torch.ones(1, 1), angles.reshape(1, -1, pairs))
    cos_sin = tuple(part.reshape(angles.shape) for part in cos_sin)
    x = torch.randn(2, 3, 2, 2 * pairs, dtype=torch.float64).to(dtype)
    exact = exact_rotation(x, torch.empty(0), torch.empty(1, 1, pairs), cos_sin=cos_sin)
    assert_rotated(rotate_embeddings(x, angles), exact, pairs, "interleaved")
    shared = tuple(part[:, :, :1] for part in cos_sin)
    exact = exact_rotation(x, torch.empty(0), torch.empty(1, 1, pairs), cos_sin=shared)
    assert_rotated(rotate_embeddings(x, angles[:, :, :1]), exact, pairs, "interleaved")


def _loops(x, positions, freqs, layout):
    """The formulas, one pair at a time: x [N, H, D], positions [N, P], freqs [P, H, F]."""
    y = np.array(x, dtype=np.longdouble)
    tokens, heads, _ = x.shape
    axes, _, pairs = freqs.shape
    for n, h, i in itertools.product(range(tokens), range(heads), range(pairs)):
        angle = np.longdouble(0)
        for a in range(axes):
            angle += np.longdouble(positions[n, a]) * np.longdouble(freqs[a, h, i])
        c, s = np.cos(angle), np.sin(angle)
        first, second = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + pairs)
        x0, x1 = np.longdouble(x[n, h, first]), np.longdouble(x[n, h, second])
        y[n, h, first] = x0 * c - x1 * s
        y[n, h, second] = x0 * s + x1 * c
    return y


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_reference_and_kernel_follow_the_formulas(layout):
    x = torch.randn(4, 3, 10, dtype=torch.float64)
    positions, freqs = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, 5, dtype=torch.float64)
    expected = _loops(x.numpy(), positions.numpy(), freqs.numpy(), layout)
    block = 2 if layout == "interleaved" else 10
    for y in (
        reference.apply_rope(x, positions, freqs, block=block),
        apply_rope(x, positions, freqs, layout=layout),
    ):
        assert np.abs(exact_array(y) - expected).max() < 4e-15


@given(call=calls(dtypes=(torch.float64,), extents=(0.0, 1.0, 10.0), half_dims=(1, 3, 8)))
def test_reference_is_the_exact_rotation(call):
    s = call.settings
    pairs, layout = call.freqs.shape[-1], s["layout"]
    block = {"interleaved": 2, "half": 2 * pairs}.get(layout, layout)
    y = reference.apply_rope(
        call.x,
        call.positions,
        call.freqs,
        0,
        block,
        s["rotary_offset"],
        s["num_prefix_tokens"],
        s["head_dim_first"],
        s["inverse"],
    )
    # PyTorch rounds the products and their sum: |angle| <= 40
    errors = pair_errors(y, call(exact_rotation), pairs, layout, s["rotary_offset"])
    assert errors.size == 0 or errors.max() < 80 * torch.finfo(torch.float64).eps


def test_angle_of_the_golden_value():
    frequency = torch.tensor(10000.0 ** (-2 / 32), dtype=torch.float32).view(1, 1, 1, 1)
    assert calculate_rope(torch.tensor([[1857]]), frequency).item() == pytest.approx(1044.2678, abs=1e-4)


def test_known_pairs():
    """A quarter turn of pair 0 and a half turn of pair 1."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    positions, freqs = torch.tensor([[1]]), torch.tensor([[[math.pi / 2, math.pi]]])
    interleaved, half = apply_rope(x, positions, freqs), apply_rope(x, positions, freqs, layout="half")
    assert interleaved[0, 0].tolist() == pytest.approx([-2, 1, -3, -4], abs=1e-6)
    assert half[0, 0].tolist() == pytest.approx([-3, -2, 1, -4], abs=1e-6)


@given(pairs=st.sampled_from((1, 2, 6, 15, 16, 33)), data=st.data())
def test_layouts_differ_by_a_permutation_of_channels(instruction_set, pairs, data):
    layout = data.draw(layouts(pairs))
    dtype = data.draw(st.sampled_from(EMBEDDING_DTYPES))
    positions, freqs, _ = operands(pairs)
    x = random_embeddings((2, 3, 2, 2 * pairs), dtype, seed=data.draw(st.integers(0, 99)), special=True)
    channels = torch.from_numpy(np.stack(pair_channels(pairs, layout), axis=-1)).flatten()
    interleaved = apply_rope(x[..., channels], positions, freqs)
    assert same_bits(apply_rope(x, positions, freqs, layout=layout)[..., channels], interleaved)


def test_names_of_layouts_are_numbers_of_channels(instruction_set):
    x = torch.randn(2, 3, 2, 12)
    positions, freqs, _ = operands(6)
    for layout, number in (("interleaved", 2), ("half", 12)):
        named = apply_rope(x, positions, freqs, layout=layout)
        assert same_bits(named, apply_rope(x, positions, freqs, layout=number))


@pytest.mark.parametrize("block", [4, 6, 8, 12])
def test_blocks_are_half_split_one_by_one(instruction_set, block):
    x = torch.randn(2, 3, 2, 48)
    positions, freqs, _ = operands(24)
    blocks = [
        apply_rope(part, positions, part_freqs, layout="half")
        for part, part_freqs in zip(x.split(block, -1), freqs.split(block // 2, -1), strict=True)
    ]
    assert same_bits(apply_rope(x, positions, freqs, layout=block), torch.cat(blocks, -1))


# ---- settings, spelled out


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("offset", [1, 2, 5])
def test_a_rotary_offset_rotates_a_slice_of_the_channels(instruction_set, offset, layout):
    x = torch.randn(2, 3, 2, 20)
    positions, freqs, _ = operands(7)
    part = apply_rope(x[..., offset : offset + 14], positions, freqs, layout=layout)
    expected = torch.cat((x[..., :offset], part, x[..., offset + 14 :]), -1)
    assert same_bits(apply_rope(x, positions, freqs, layout=layout, rotary_offset=offset), expected)


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_channels_outside_the_rotary_range_are_copied_bit_for_bit(layout, dtype):
    x = torch.randn(5, 2, 11).to(dtype)
    x[0, 0, 0], x[1, 1, 10], x[2, 0, 1] = math.nan, math.inf, -0.0
    y = apply_rope(x, torch.randn(5, 2), torch.randn(2, 2, 3), layout=layout, rotary_offset=2)
    for channels in (slice(0, 2), slice(8, 11)):
        assert torch.equal(y[..., channels].view(torch.uint8), x[..., channels].view(torch.uint8))
    assert not torch.equal(y[..., 2:8], x[..., 2:8])


@given(call=calls(half_dims=(1, 3, 8)).filter(lambda call: call.settings["head_dim_first"]))
def test_heads_first_is_a_transposed_view(instruction_set, call):
    y = apply_rope(
        call.x.transpose(-3, -2), call.positions, call.freqs, **{**call.settings, "head_dim_first": False}
    )
    assert same_bits(call(apply_rope), y.transpose(-3, -2))


@given(call=calls(half_dims=(1, 3, 8, 17)))
def test_broadcasting_is_expanding(instruction_set, call):
    y = call(apply_rope)
    rows = y.transpose(-3, -2) if call.settings["head_dim_first"] else y
    lead = list(rows.shape[:-2])
    prefix = call.settings["num_prefix_tokens"]
    if prefix:
        lead[-1] -= prefix
    x = call.x.expand(y.shape).clone()
    positions = call.positions.expand(*lead, -1).clone()
    assert same_bits(y, apply_rope(x, positions, call.freqs, **call.settings))


@given(call=calls(half_dims=(1, 3, 8, 17)))
def test_shared_frequencies_are_those_of_each_head(instruction_set, call):
    heads = call.x.shape[-3 if call.settings["head_dim_first"] else -2]
    own = call.freqs.expand(-1, heads, -1).contiguous()
    assert same_bits(call(apply_rope), apply_rope(call.x, call.positions, own, **call.settings))


@pytest.mark.parametrize("rank", range(2, 17))
def test_leading_dims_of_any_number_are_rows(instruction_set, rank):
    sizes = [3, *[2] * 13][: rank - 2]
    x = torch.randn(*sizes, 2, 6)
    # every other dim shares its positions, so that no two dims are one in memory
    shared = [size if d % 2 else 1 for d, size in enumerate(sizes)]
    positions = random_positions((*shared, 2), torch.float32, 10.0, seed=rank)
    freqs = random_freqs(2, 2, 3, torch.float32, seed=1)
    rows = apply_rope(x.reshape(-1, 2, 6), positions.expand(*sizes, 2).reshape(-1, 2), freqs)
    assert same_bits(apply_rope(x, positions, freqs), rows.view(x.shape))
    backwards = in_memory(x, "reversed_dims")
    assert same_bits(apply_rope(backwards, positions, freqs), rows.view(x.shape))


def test_dims_of_equal_size_are_not_mixed_up(instruction_set):
    x, positions, freqs = torch.randn(3, 3, 3, 6), torch.randn(3, 3, 3), torch.randn(3, 3, 3)
    exact = exact_rotation(x, positions, freqs)
    assert_rotated(apply_rope(x, positions, freqs), exact, 3, "interleaved")
    exact = exact_rotation(x, positions[0], freqs, head_dim_first=True)
    assert_rotated(apply_rope(x, positions[0], freqs, head_dim_first=True), exact, 3, "interleaved")


def test_grids_that_are_not_square_keep_their_axes_apart(instruction_set):
    x, freqs = torch.randn(2, 3, 5, 2, 8), random_freqs(2, 1, 4, torch.float32, seed=3)
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij"), -1)
    y = apply_rope(x, grid, freqs)
    for row, column in itertools.product(range(3), range(5)):
        cell = apply_rope(x[:, row, column], torch.tensor([row, column]), freqs)
        assert same_bits(y[:, row, column], cell)


@pytest.mark.parametrize(
    "shape",
    [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 0, 0, 8), (0, 8)],
    ids=["no_batch", "no_tokens", "no_heads", "nothing", "no_heads_of_one_token"],
)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_nothing_in_gives_nothing_out(instruction_set, shape, dtype):
    x, positions, freqs = torch.empty(shape, dtype=dtype), torch.zeros(*shape[:-2], 2), torch.ones(2, 1, 3)
    y = apply_rope(x, positions, freqs)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert apply_rope_(x, positions, freqs) is x


@pytest.mark.parametrize("layout", ["interleaved", "half", 4])
@pytest.mark.parametrize("shape", [(2, 3, 2, 8), (2, 3, 2, 0)], ids=["channels", "no_channels"])
def test_no_pairs_is_a_copy(instruction_set, shape, layout):
    x = torch.randn(shape)
    y = apply_rope(x, torch.ones(3, 2), torch.ones(2, 1, 0), layout=layout)
    assert same_bits(y, x)
    assert x.numel() == 0 or y.data_ptr() != x.data_ptr()


def test_only_prefix_tokens_are_a_copy(instruction_set):
    x = torch.randn(2, 3, 2, 8)
    for positions in (torch.ones(0, 2), torch.ones(1, 2), torch.ones(2, 0, 2)):
        assert same_bits(apply_rope(x, positions, torch.ones(2, 1, 4), num_prefix_tokens=3), x)


def test_options_are_keywords_only():
    x, positions, freqs = torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(2, 2, 4)
    for function in (apply_rope, apply_rope_, apply_rope_qkv_):
        with pytest.raises(TypeError, match="positional"):
            function(x, positions, freqs, "half")


# ---- memory


@given(call=calls(half_dims=(1, 3, 8, 17)))
def test_inputs_are_not_touched(instruction_set, call):
    inputs = (call.x, call.positions, call.freqs)
    before = [(whole_storage(tensor).clone(), tensor._version) for tensor in inputs]
    call(apply_rope)
    for tensor, (storage, version) in zip(inputs, before, strict=True):
        assert torch.equal(whole_storage(tensor), storage)
        assert tensor._version == version


@given(call=calls(half_dims=(1, 3, 8, 17), memory_kinds=DISTINCT_MEMORY_KINDS, broadcast_x=False))
def test_in_place_gives_the_same_bits_in_the_callers_memory(instruction_set, call):
    expected, address, version = call(apply_rope), call.x.data_ptr(), call.x._version
    assert call(apply_rope_) is call.x
    assert same_bits(call.x, expected)
    assert call.x.data_ptr() == address
    assert call.x._version > version


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("memory", ["qkv_slice", "columns", "step_2", "channel_step_2"])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_in_place_writes_nothing_around_its_tensor(instruction_set, dtype, memory, layout):
    for pairs in HALF_DIMS:
        positions, freqs, _ = operands(pairs, heads=3)
        values = random_embeddings((2, 3, 3, 2 * pairs), dtype, seed=pairs)
        x = in_memory(values, memory)
        before = whole_storage(x).clone()
        apply_rope_(x, positions, freqs, layout=layout)
        assert not torch.equal(whole_storage(x), before)
        x.copy_(values)
        assert torch.equal(whole_storage(x), before)


@pytest.mark.parametrize("memory", ["qkv_slice", "columns", "step_2", "channel_step_2", "odd_offset"])
@pytest.mark.parametrize("pairs", SOME_HALF_DIMS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_nothing_around_the_inputs_leaks_in(instruction_set, dtype, pairs, memory):
    positions, freqs, _ = operands(pairs)
    x = in_memory(random_embeddings((2, 3, 2, 2 * pairs), dtype, seed=pairs), memory)
    positions, freqs = in_memory(positions, memory), in_memory(freqs, memory)
    for layout in ("interleaved", "half"):
        assert apply_rope(x, positions, freqs, layout=layout).isfinite().all()
        assert apply_rope(x, positions[:, :1], freqs[:1, :1], layout=layout).isfinite().all()


@pytest.fixture
def new_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, 3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@given(call=calls(half_dims=(1, 3, 8, 17)))
def test_every_element_is_written(new_memory_is_nan, instruction_set, call):
    assert call(apply_rope).isfinite().all()


@pytest.mark.parametrize("memory", MEMORY_KINDS)
def test_strides_follow_dense_inputs_and_are_contiguous_for_others(memory):
    x = in_memory(torch.randn(4, 3, 2, 8), memory)
    positions, freqs, _ = operands(4)
    y = apply_rope(x, positions, freqs)
    assert y.stride() == (x.stride() if memory in DENSE_MEMORY_KINDS else (48, 16, 8, 1))


def test_strides_are_contiguous_where_the_result_is_larger_than_x():
    x = in_memory(torch.randn(1, 3, 2, 8), "transposed")
    positions, freqs, _ = operands(4)
    assert apply_rope(x, positions.expand(5, 3, 2), freqs).stride() == (48, 16, 8, 1)


def test_results_have_memory_of_their_own():
    """Also where nothing is rotated, and where a batch shares one query."""
    for positions in (torch.zeros(5, 2), torch.zeros(3, 5, 2)):
        x = torch.randn(1, 5, 2, 8)
        y = apply_rope(x, positions, torch.randn(2, 2, 4))
        before = x.clone()
        y.fill_(1)
        assert torch.equal(x, before)
        assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("pairs", SOME_HALF_DIMS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("head_dim_first", [False, True], ids=["tokens_first", "heads_first"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_packed_queries_and_keys_are_rotated_and_values_left(
    instruction_set, pairs, dtype, head_dim_first, prefix
):
    positions, freqs, _ = operands(pairs)
    shape = (2, 3, 2, 3 + prefix, 2 * pairs) if head_dim_first else (2, 3 + prefix, 3, 2, 2 * pairs)
    at = 1 if head_dim_first else 2
    qkv = random_embeddings(shape, dtype, seed=pairs, special=True)
    q, k, v = (part.clone() for part in qkv.unbind(at))
    settings = {"head_dim_first": head_dim_first, "num_prefix_tokens": prefix, "layout": "half"}
    assert apply_rope_qkv_(qkv, positions, freqs, **settings) is qkv
    rotated = [apply_rope(part, positions, freqs, **settings) for part in (q, k)]
    for part, expected in zip(qkv.unbind(at), (*rotated, v), strict=True):
        assert same_bits(part, expected)


def test_packed_projection_of_any_strides():
    buffer = torch.full((5, 2, 4, 3, 16), math.nan)
    qkv = buffer.permute(1, 0, 3, 2, 4)[..., ::2]
    qkv.copy_(torch.randn(2, 5, 3, 4, 8))
    positions, freqs, before = torch.randn(2, 5, 2), torch.randn(2, 4, 4), qkv.clone()
    apply_rope_qkv_(qkv, positions, freqs)
    assert torch.equal(qkv[:, :, 1], apply_rope(before[:, :, 1], positions, freqs))
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    assert buffer.isnan().sum() == buffer.numel() // 2


# ---- properties


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("pairs", SOME_HALF_DIMS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_norm_of_each_pair_is_kept(instruction_set, dtype, pairs, layout):
    positions, freqs, _ = operands(pairs)
    x = random_embeddings((2, 3, 2, 2 * pairs), dtype, seed=pairs)
    before, after = exact_array(x), exact_array(apply_rope(x, positions * 1000, freqs, layout=layout))
    first, second = pair_channels(pairs, layout)
    before, after = (np.hypot(values[..., first], values[..., second]) for values in (before, after))
    np.testing.assert_array_less(np.abs(after - before), 4 * torch.finfo(dtype).eps * before)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("position_dtype", POSITION_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_position_zero_is_the_identity_to_the_last_bit(instruction_set, dtype, position_dtype, inverse):
    limits = torch.finfo(dtype)
    special = [0.0, limits.smallest_normal * limits.eps, limits.smallest_normal, 1.0, 0.1, limits.max]
    values = torch.tensor([sign * value for value in special for sign in (1, -1)], dtype=torch.float64).to(
        dtype
    )
    pairs_of_values = torch.cartesian_prod(values, values)
    positions = torch.zeros(1, 2).to(position_dtype)
    for layout in ("interleaved", "half", 4):
        x = pairs_of_values.view(1, 1, -1)
        freqs = random_freqs(2, 1, len(pairs_of_values), torch.float32, seed=5)
        assert same_bits(apply_rope(x, positions, freqs, layout=layout, inverse=inverse), x)
        if position_dtype.is_floating_point:
            assert same_bits(apply_rope(x, -positions, freqs, layout=layout, inverse=inverse), x)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_every_pattern_of_leading_bits_survives_position_zero(instruction_set, dtype, layout):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = torch.arange(-(2**15), 2**15) << (8 * dtype.itemsize - 16)
    x = patterns.to(integers).view(dtype)
    x = x[x.isfinite()]
    x = x[: len(x) // 64 * 64].view(-1, 1, 64)
    freqs = random_freqs(1, 1, 32, torch.float32, seed=0)
    assert same_bits(apply_rope(x, torch.zeros(1), freqs, layout=layout), x)


@given(call=calls(half_dims=(1, 3, 8, 17), special=False, broadcast_x=False))
def test_inverse_undoes(instruction_set, call):
    there = call(apply_rope)
    back = apply_rope(
        there, call.positions, call.freqs, **{**call.settings, "inverse": not call.settings["inverse"]}
    )
    errors = pair_errors(
        back,
        exact_array(call.x),
        call.freqs.shape[-1],
        call.settings["layout"],
        call.settings["rotary_offset"],
    )
    assert errors.size == 0 or errors.max() <= 8 * torch.finfo(call.x.dtype).eps


@given(call=calls(half_dims=(1, 3, 8, 17), position_dtypes=EMBEDDING_DTYPES))
def test_inverse_is_the_opposite_position(instruction_set, call):
    opposite = apply_rope(call.x, -call.positions, call.freqs, **call.settings)
    torch.testing.assert_close(
        call(apply_rope, inverse=not call.settings["inverse"]), opposite, rtol=0, atol=0
    )


@pytest.mark.parametrize("factor", [-1.0, 0.25, -8.0])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_scaling_by_a_power_of_two_and_by_minus_one_commutes(instruction_set, dtype, factor):
    positions, freqs, _ = operands(17)
    x = random_embeddings((2, 3, 2, 34), dtype, seed=0)
    y = apply_rope(x * factor, positions, freqs)
    normal = y.abs() > 1e-3
    assert normal.float().mean() > 0.9
    assert torch.equal(y[normal], (apply_rope(x, positions, freqs) * factor)[normal])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sums_of_embeddings_rotate_as_sums(instruction_set, layout):
    positions, freqs, _ = operands(17)
    a, b = torch.randn(2, 2, 3, 2, 34, dtype=torch.float64)
    together = apply_rope(2 * a - 3 * b, positions, freqs, layout=layout)
    apart = 2 * apply_rope(a, positions, freqs, layout=layout) - 3 * apply_rope(
        b, positions, freqs, layout=layout
    )
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-14)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_axes_rotate_one_after_another(instruction_set, layout):
    positions, freqs = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 2, 9, dtype=torch.float64)
    x = torch.randn(4, 2, 18, dtype=torch.float64)
    y = x
    for a in range(3):
        y = apply_rope(y, positions[:, a : a + 1], freqs[a : a + 1], layout=layout)
    torch.testing.assert_close(apply_rope(x, positions, freqs, layout=layout), y, rtol=0, atol=2e-14)


@pytest.mark.parametrize("axis", range(4))
def test_every_axis_turns_every_pair_of_its_own(instruction_set, axis):
    x, freqs = torch.ones(1, 2, 16), random_freqs(4, 2, 8, torch.float32, seed=0)
    freqs[:, :, axis::4] = 0
    freqs[axis, :, axis::4] = 1
    positions = torch.zeros(2, 4)
    positions[1, axis] = 1
    still, moved = apply_rope(x, positions, freqs)
    turned = (still != moved).view(2, 8, 2).any(-1)
    assert turned[:, axis::4].all()
    positions[1, axis], positions[1, axis - 1] = 0, 1
    still, moved = apply_rope(x, positions, freqs)
    assert not (still != moved).view(2, 8, 2)[:, axis::4].any()


@st.composite
def shifted_positions(draw):
    """Positions of queries and keys, and again with the same shift added, all exact in float32."""
    axes = draw(st.integers(1, 4))
    coordinates = st.integers(-4000, 4000).map(lambda i: i / 8)
    vector = st.lists(coordinates, min_size=axes, max_size=axes)
    query, key, shift = torch.tensor([draw(vector) for _ in range(3)])
    return query, key, shift


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 4e-15), (torch.float32, 2e-6)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@given(positions=shifted_positions(), seed=st.integers(0, 100))
@settings(max_examples=30)
def test_scores_depend_on_differences_of_positions_only(
    instruction_set, layout, dtype, tolerance, positions, seed
):
    query_position, key_position, shift = positions
    freqs = random_freqs(len(shift), 3, 8, dtype, seed)
    q, k = random_embeddings((2, 3, 16), torch.float64, seed).to(dtype)

    def scores(offset):
        rotated = [
            apply_rope(x, position + offset, freqs, layout=layout)
            for x, position in ((q, query_position), (k, key_position))
        ]
        return (rotated[0].double() * rotated[1].double()).sum(-1)

    error = (scores(torch.zeros(())) - scores(shift)).abs()
    assert (error <= tolerance * q.double().norm(dim=-1) * k.double().norm(dim=-1)).all()


def test_scores_do_depend_on_differences_of_positions():
    q, k, freqs = torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 1)
    rotated = apply_rope(k, torch.arange(4.0)[:, None], freqs)
    scores = (rotated * q).sum(-1)[:, 0]
    torch.testing.assert_close(scores, 2 * torch.arange(4.0).cos())


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("pairs", SOME_HALF_DIMS)
def test_permuting_heads_permutes_the_result(instruction_set, dtype, pairs):
    order = torch.tensor([2, 0, 3, 1])
    positions, freqs, _ = operands(pairs, heads=4)
    x = random_embeddings((2, 3, 4, 2 * pairs), dtype, seed=pairs)
    y = apply_rope(x, positions, freqs)
    assert same_bits(apply_rope(x[:, :, order], positions, freqs[:, order]), y[:, :, order])
    assert not same_bits(apply_rope(x[:, :, order], positions, freqs), y[:, :, order])


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("pairs", SOME_HALF_DIMS)
def test_permuting_batch_entries_permutes_the_result(instruction_set, dtype, pairs):
    order = torch.tensor([4, 2, 0, 3, 1])
    positions, freqs, _ = operands(pairs)
    x = random_embeddings((5, 3, 2, 2 * pairs), dtype, seed=pairs)
    assert same_bits(apply_rope(x[order], positions, freqs), apply_rope(x, positions, freqs)[order])
    own = random_positions((5, 3, 2), torch.float32, 20.0, seed=3)
    assert same_bits(apply_rope(x[order], own[order], freqs), apply_rope(x, own, freqs)[order])


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("pairs", SOME_HALF_DIMS)
def test_permuting_tokens_with_their_positions_permutes_the_result(instruction_set, dtype, pairs):
    order = torch.randperm(70)
    freqs = random_freqs(2, 2, pairs, torch.float32, seed=1)
    positions = random_positions((70, 2), torch.float32, 20.0, seed=2)
    x = random_embeddings((2, 70, 2, 2 * pairs), dtype, seed=pairs)
    y = apply_rope(x, positions, freqs)
    assert same_bits(apply_rope(x[:, order], positions[order], freqs), y[:, order])
    assert not same_bits(apply_rope(x[:, order], positions, freqs), y[:, order])


def test_scaling_positions_is_scaling_frequencies():
    x, positions, freqs = torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(2, 1, 4)
    assert same_bits(apply_rope(x, positions / 4, freqs), apply_rope(x, positions, freqs / 4))


def test_a_query_of_its_own_is_rotated_as_one_beside_a_key():
    positions, freqs, _ = operands(8)
    q, k = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    both = apply_rope(torch.stack((q, k)), positions, freqs)
    assert same_bits(both[0], apply_rope(q, positions, freqs))
    assert same_bits(both[1], apply_rope(k, positions, freqs))


def test_padding_does_not_change_real_tokens():
    x, positions, freqs = torch.randn(5, 2, 16), torch.arange(5.0)[:, None], torch.randn(1, 1, 8)
    padded = torch.cat((torch.full((3, 2, 16), math.nan), x))
    padded_positions = torch.cat((torch.zeros(3, 1), positions))
    assert same_bits(apply_rope(padded, padded_positions, freqs)[3:], apply_rope(x, positions, freqs))
