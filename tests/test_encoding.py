"""RoPEEncodingND: what it computes, warns of, and its helpers."""

import io
import math
import warnings

import numpy as np
import pytest
import torch
from modules import (
    GROUPS,
    by_complex_numbers,
    by_reference,
    every_group,
    full_frequencies,
    group_sizes,
    make,
    pixels,
)
from strategies import EMBEDDING_DTYPES
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from nd_rotary_encodings import RoPEEncodingND, rotate_embeddings

# shapes are checked in Python, which the tracer remarks on
tracing = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


# ---- forward


@every_group
@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward_only"])
def test_forward_is_a_complex_multiplication(options, forward_only):
    module = make(dtype=torch.float64, forward_only=forward_only, **options)
    query, positions = torch.randn(2, 5, 24, dtype=torch.float64), pixels(2, 5, 3, dtype=torch.float64)
    expected = by_complex_numbers(query, positions, full_frequencies(module))
    torch.testing.assert_close(module(query, positions).detach(), expected, rtol=0, atol=1e-12)


@every_group
def test_forward_and_gradients_are_those_of_the_definition(options):
    module = make(dtype=torch.float64, **options)
    leaves = [
        torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True),
        pixels(2, 5, 3, dtype=torch.float64).requires_grad_(),
        *module.parameters(),
    ]
    weight = torch.randn(2, 5, 24, dtype=torch.float64)
    actual = torch.autograd.grad((module(*leaves[:2]) * weight).sum(), leaves)
    expected = torch.autograd.grad((by_reference(module, *leaves[:2]) * weight).sum(), leaves)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@every_group
def test_channels_of_a_row_of_false_pass_through_bit_for_bit(options):
    module = make(**options)
    query = torch.randn(5, 24)
    rotated = module(query, pixels(5, 3)).detach()
    for (start, end), row in zip(
        module.encoding_ranges.tolist(), module.freq_group_pattern.tolist(), strict=True
    ):
        channels = slice(2 * start, 2 * end)
        same = torch.equal(rotated.view(5, 2, 12)[..., channels], query.view(5, 2, 12)[..., channels])
        assert same == (not any(row) or start == end)


def test_heads_tokens_and_batch_are_not_confused_where_their_numbers_are_equal():
    module = RoPEEncodingND(3, 3 * 6, 3, dtype=torch.float64)
    query, positions = torch.randn(3, 3, 18, dtype=torch.float64), pixels(3, 3, 3, dtype=torch.float64)
    expected = by_complex_numbers(query, positions, full_frequencies(module))
    torch.testing.assert_close(module(query, positions).detach(), expected, rtol=0, atol=1e-12)


def test_queries_may_have_eight_dims():
    module = make(dtype=torch.float64)
    query, positions = torch.randn(2, 1, 2, 3, 1, 2, 2, 24).double(), pixels(2, 1, 2, 3, 1, 2, 2, 3).double()
    expected = by_complex_numbers(query, positions, full_frequencies(module))
    torch.testing.assert_close(module(query, positions).detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (0, 5, 24)], ids=str)
def test_no_tokens_give_empty_results_and_zero_gradients(shape):
    module = make()
    query = torch.randn(shape, requires_grad=True)
    rotated = module(query, pixels(*shape[:-1], 3))
    assert rotated.shape == shape
    rotated.sum().backward()
    assert query.grad.shape == shape
    assert torch.equal(module.freqs[0].grad, torch.zeros_like(module.freqs[0]))


def test_a_single_token_needs_no_leading_dims():
    module = make()
    query, position = torch.randn(24), pixels(3)
    assert torch.equal(module(query, position), module(query[None], position[None])[0])


def test_output_keeps_the_dtype_of_its_query_and_of_its_key():
    module = make()
    for query_type in EMBEDDING_DTYPES:
        for key_type in EMBEDDING_DTYPES:
            for position_type in (torch.int32, torch.float16, torch.float64):
                query, key = torch.randn(4, 24).to(query_type), torch.randn(4, 24).to(key_type)
                positions = pixels(4, 3).to(position_type)
                rotated = module(query, positions, key)
                assert [x.dtype for x in rotated] == [query_type, key_type]
                for before, after in zip((query, key), rotated, strict=True):
                    expected = by_complex_numbers(before, positions, full_frequencies(module))
                    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(before.dtype, 4e-6)
                    torch.testing.assert_close(after.detach().double(), expected, rtol=0, atol=tolerance)


def test_key_uses_the_positions_of_the_query_by_default():
    module = make()
    query, key, positions = torch.randn(2, 5, 24), torch.randn(2, 5, 24), pixels(2, 5, 3)
    rotated = module(query, positions, key)
    assert isinstance(rotated, tuple)
    assert torch.equal(rotated[0], module(query, positions))
    assert torch.equal(rotated[1], module(key, positions))


def test_key_may_have_positions_number_and_batch_of_its_own():
    module = make()
    query, query_pos, key, key_pos = (
        torch.randn(2, 5, 24),
        pixels(2, 5, 3),
        torch.randn(9, 24),
        pixels(2, 9, 3),
    )
    rotated = module(query, query_pos, key, key_pos)
    assert torch.equal(rotated[0], module(query, query_pos))
    assert torch.equal(rotated[1], module(key, key_pos))
    assert rotated[1].shape == (2, 9, 24)


@pytest.mark.parametrize(
    ("query_shape", "position_shape"),
    [
        ((1, 5), (4, 5)),
        ((5,), (4, 5)),
        ((4, 5), (1, 5)),
        ((4, 5), (5,)),
        ((4, 1), (1, 5)),
        ((1, 5), (4, 1)),
        ((), (4, 5)),
        ((4, 5), ()),
        ((4, 3, 5), (3, 1)),
        ((1, 3, 1), (4, 1, 5)),
    ],
    ids=str,
)
def test_leading_dims_broadcast_both_ways_and_gradients_are_summed_back(query_shape, position_shape):
    module = make(dtype=torch.float64)
    query = torch.randn(*query_shape, 24, dtype=torch.float64, requires_grad=True)
    positions = pixels(*position_shape, 3, dtype=torch.float64).requires_grad_()
    full = torch.broadcast_shapes(query_shape, position_shape)
    rotated = module(query, positions)
    assert rotated.shape == (*full, 24)
    expected = by_complex_numbers(
        query.expand(*full, 24), positions.expand(*full, 3), full_frequencies(module)
    )
    torch.testing.assert_close(rotated.detach(), expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(rotated)
    leaves = [query, positions, *module.parameters()]
    actual = torch.autograd.grad((rotated * weight).sum(), leaves)
    # `expand` sums the gradients of its copies by PyTorch's own rule
    by_hand = by_reference(module, query.expand(*full, 24), positions.expand(*full, 3))
    for a, b in zip(actual, torch.autograd.grad((by_hand * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@every_group
def test_every_input_gets_a_gradient(options):
    for use_checkpointing in (False, True):
        module = make(use_checkpointing=use_checkpointing, **options)
        inputs = [torch.randn(5, 24), pixels(5, 3), torch.randn(6, 24), pixels(6, 3)]
        for tensor in inputs:
            tensor.requires_grad_()
        query, key = module(*inputs)
        (query.sin().sum() + key.cos().sum()).backward()
        for tensor in (inputs[0], inputs[2]):
            assert tensor.grad.count_nonzero() == tensor.numel()
        used_axes = int(module.freq_group_pattern.any(0).sum())
        for tensor in (inputs[1], inputs[3]):
            assert tensor.grad.count_nonzero() == len(tensor) * used_axes
        for freqs in module.parameters():
            assert freqs.grad.count_nonzero() == freqs.numel()


def test_checkpointing_changes_nothing():
    plain, checkpointed = make(), make(use_checkpointing=True)
    checkpointed.load_state_dict(plain.state_dict())
    query, key, positions = torch.randn(2, 5, 24), torch.randn(2, 5, 24), pixels(2, 5, 3)
    results = []
    for module in (plain, checkpointed):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, positions, key)]
        rotated = module(*leaves)
        (rotated[0].sin().sum() + rotated[1].cos().sum()).backward()
        results.append([*rotated, *(leaf.grad for leaf in leaves), module.freqs[0].grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inputs_are_not_modified():
    for options in ({}, {"forward_only": True}):
        tensors = [torch.randn(2, 5, 24), pixels(2, 5, 3), torch.randn(2, 5, 24), pixels(2, 5, 3)]
        before = [(tensor.clone(), tensor._version) for tensor in tensors]
        make(**options)(*tensors)
        for tensor, (value, version) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, value)
            assert tensor._version == version


def test_weights_move_in_one_step_of_adamw():
    module = make(**GROUPS["closure"])
    before = [freqs.detach().clone() for freqs in module.freqs]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    module(torch.randn(2, 5, 24), pixels(2, 5, 3)).sin().sum().backward()
    optimizer.step()
    for freqs, old in zip(module.freqs, before, strict=True):
        # the first step of Adam is lr in every coordinate whose gradient is not zero
        torch.testing.assert_close((freqs - old).abs(), torch.full_like(old, 0.01), rtol=1e-3, atol=0)


def test_inference_then_training():
    module = make()
    query, positions = torch.randn(2, 5, 24), pixels(2, 5, 3)
    with torch.inference_mode():
        first = module(query, positions)
    query.requires_grad_()
    second = module(query, positions)
    assert torch.equal(first, second)
    second.sum().backward()
    assert query.grad is not None
    assert module.freqs[0].grad is not None


def test_forward_only_records_nothing():
    module = make(forward_only=True)
    rotated = module(torch.randn(5, 24), pixels(5, 3), torch.randn(5, 24))
    assert all(x.grad_fn is None and not x.requires_grad for x in rotated)


# ---- warnings


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


@pytest.mark.parametrize(
    ("values", "warns"),
    [
        ([0.25, 0.5], True),
        ([1e-6, 1.0], True),
        ([1.0, 1.0], True),
        ([0.0, 0.5], False),
        ([0.5, 1.0001], False),
        ([-0.5, 0.5], False),
        ([math.nan, 0.5], False),
        ([0.5, math.inf], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_positions_in_the_unit_interval_are_warned_of(values, warns, dtype):
    positions = torch.tensor(values, dtype=dtype)[:, None]
    if dtype == torch.float16 and values[0] == 1e-6:
        positions[0] = 1e-3
    if dtype == torch.float16 and values[1] == 1.0001:
        positions[1] = 1.002
    caught = warnings_of(lambda: RoPEEncodingND(1, 4, 2)(torch.randn(2, 4), positions))
    assert [w.category for w in caught] == [UserWarning] * warns
    assert all("potentially normalized coordinates" in str(w.message) for w in caught)


def test_integers_and_empty_positions_are_not_warned_of():
    assert not warnings_of(lambda: make()(torch.randn(5, 24), torch.ones(5, 3, dtype=torch.int64)))
    assert not warnings_of(lambda: make()(torch.randn(0, 24), torch.ones(0, 3)))


def test_only_the_first_call_looks_at_the_positions():
    normalized = torch.rand(5, 3) * 0.9 + 0.05
    module, query = make(), torch.randn(5, 24)
    assert len(warnings_of(lambda: module(query, normalized))) == 1
    assert not warnings_of(lambda: module(query, normalized))
    module = make()
    module(query, pixels(5, 3))
    assert not warnings_of(lambda: module(query, normalized))


def test_positions_that_require_grad_and_parameters_are_looked_at_too():
    normalized = torch.rand(5, 3) * 0.9 + 0.05
    for positions in (normalized.clone().requires_grad_(), nn.Parameter(normalized)):
        assert len(warnings_of(lambda positions=positions: make()(torch.randn(5, 24), positions))) == 1


def test_positions_are_not_looked_at_under_vmap():
    module, query = make(), torch.randn(2, 5, 24)
    assert not warnings_of(lambda: torch.vmap(module)(query, torch.rand(2, 5, 3) * 0.9 + 0.05))


def test_make_fx_of_a_first_call_serves_other_positions():
    module, query = make(), torch.randn(5, 24)
    traced = make_fx(lambda positions: module(query, positions))(pixels(5, 3))
    positions = pixels(5, 3)
    assert torch.equal(traced(positions), module(query, positions))


@pytest.mark.parametrize("which", range(4), ids=["query", "query_pos", "key", "key_pos"])
def test_forward_only_warns_once_that_the_result_is_detached(which):
    module = make(forward_only=True)
    inputs = [torch.randn(5, 24), pixels(5, 3), torch.randn(5, 24), pixels(5, 3)]
    inputs[which].requires_grad_()
    with torch.no_grad():
        module(*inputs)
    with pytest.warns(UserWarning, match="the result is detached"):
        rotated = module(*inputs)
    assert not any(x.requires_grad for x in rotated)
    module(*inputs)


def test_forward_only_does_not_warn_of_its_own_parameters():
    make(forward_only=True)(torch.randn(5, 24), pixels(5, 3))


@pytest.mark.parametrize("method", ["forward", "rotate_qkv_"])
@pytest.mark.parametrize("kind", ["normalized", "detached"])
def test_warnings_point_at_the_callers_line(kind, method):
    x, positions = torch.randn(5, 24 if method == "forward" else 72), pixels(5, 3)
    if kind == "normalized":
        module, positions = make(), torch.rand(5, 3) * 0.9 + 0.05
    else:
        module, x = make(forward_only=True), x.requires_grad_() * 1
    rotate = module if method == "forward" else module.rotate_qkv_
    caught = warnings_of(lambda: rotate(x, positions))
    assert [w.filename for w in caught] == [__file__]


# ---- helpers


def test_position_grid_counts_in_the_order_of_the_indices():
    grid = RoPEEncodingND.position_grid((2, 3, 4, 5, 24))
    assert grid.shape == (3, 4, 5, 3)
    assert grid.dtype == torch.int64
    assert [tuple(row) for row in grid.reshape(-1, 3).tolist()] == list(np.ndindex(3, 4, 5))


@pytest.mark.parametrize(
    ("shape", "options", "grid"),
    [
        ((2, 4, 3, 24), {}, (4, 3)),
        ((2, 7, 24), {}, (7,)),
        ((3, 4, 5), {"start_dim": 0, "end_dim": 3}, (3, 4, 5)),
        ((2, 24, 3, 4), {"start_dim": 2, "end_dim": 4}, (3, 4)),
        (torch.tensor([2, 3, 5, 24]), {}, (3, 5)),
        (torch.Size([2, 3, 5, 24]), {"dtype": torch.float32}, (3, 5)),
    ],
)
def test_position_grid_of_any_dims(shape, options, grid):
    positions = RoPEEncodingND.position_grid(shape, **options)
    assert positions.dtype == options.get("dtype", torch.int64)
    assert positions.reshape(-1, len(grid)).tolist() == [list(index) for index in np.ndindex(*grid)]


def test_position_grid_on_another_device():
    assert RoPEEncodingND.position_grid((1, 2, 3, 8), device="meta").is_meta


@every_group
def test_joined_frequencies_are_zero_where_a_group_lacks_the_axis(options):
    module = make(**options)
    full = module.grouped_rope_freqs_tensor(module.freqs)
    heads = 1 if options.get("share_heads") else 2
    assert full.shape == (3, module.n_freq_groups, heads, 6)
    expected, start = torch.zeros(full.shape), 0
    for group, (row, size) in enumerate(
        zip(module.freq_group_pattern.tolist(), group_sizes(module), strict=True)
    ):
        values = iter(module.freqs[group].detach())
        for axis, used in enumerate(row):
            if used:
                expected[axis, group, :, start : start + size] = next(values)
        start += size
    assert torch.equal(full, expected)
    assert torch.equal(module.grouped_rope_freqs_tensor(list(module.freqs)), expected)


def test_joined_frequencies_take_a_single_tensor_and_are_differentiable():
    module = make()
    full = module.grouped_rope_freqs_tensor(module.freqs[0])
    (full * 3).sum().backward()
    assert torch.equal(module.freqs[0].grad, torch.full((3, 2, 6), 3.0))


@every_group
def test_the_parts_compose_to_the_forward(options):
    module = make(dtype=torch.float64, **options)
    query, positions = torch.randn(2, 5, 24, dtype=torch.float64), pixels(2, 5, 3, dtype=torch.float64)
    freqs = module.grouped_rope_freqs_tensor(module.freqs)
    split = query.view(2, 5, 2, 12)
    expected = module(query, positions)
    by_angles = module.rotate_embeddings(split, module.calculate_rope(positions, freqs))
    torch.testing.assert_close(by_angles.flatten(-2), expected, rtol=0, atol=1e-12)
    end_to_end = module.apply_rope_endtoend(split, positions, freqs)
    torch.testing.assert_close(end_to_end.flatten(-2), expected, rtol=0, atol=1e-12)


def test_end_to_end_rotates_the_key_by_the_same_positions():
    module = make()
    freqs = module.grouped_rope_freqs_tensor(module.freqs)
    query, key, positions = torch.randn(5, 2, 12), torch.randn(5, 2, 12), pixels(5, 3)
    rotated = module.apply_rope_endtoend(query, positions, freqs, key_embeddings=key)
    assert isinstance(rotated, tuple)
    assert torch.equal(rotated[0], module.apply_rope_endtoend(query, positions, freqs))
    assert torch.equal(rotated[1], module.apply_rope_endtoend(key, positions, freqs))
    assert all(x.requires_grad for x in rotated)
    expected = by_complex_numbers(key.flatten(-2), positions, full_frequencies(module))
    torch.testing.assert_close(rotated[1].detach().flatten(-2).double(), expected, rtol=0, atol=4e-6)


def test_end_to_end_forward_only_and_in_place():
    module = make()
    freqs = module.grouped_rope_freqs_tensor(module.freqs)
    query, key, positions = torch.randn(5, 2, 12), torch.randn(5, 2, 12), pixels(5, 3)
    expected = module.apply_rope_endtoend(query, positions, freqs, forward_only=True, key_embeddings=key)
    assert not any(x.requires_grad for x in expected)
    rotated = module.apply_rope_endtoend(query, positions, freqs, True, True, key)
    assert rotated[0] is query
    assert rotated[1] is key
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


def test_static_rotate_embeddings_takes_angles_with_fewer_dims():
    query, angles = torch.randn(4, 5, 2, 12), torch.randn(5, 1, 6)
    expected = rotate_embeddings(query, angles.expand(4, 5, 1, 6))
    assert torch.equal(RoPEEncodingND.rotate_embeddings(query, angles), expected)


def test_static_rotate_embeddings_forward_only_and_in_place():
    query, angles = torch.randn(5, 2, 12, requires_grad=True), torch.randn(5, 2, 6)
    expected = RoPEEncodingND.rotate_embeddings(query, angles)
    assert expected.requires_grad
    forward_only = RoPEEncodingND.rotate_embeddings(query, angles, forward_only=True)
    assert torch.equal(forward_only, expected)
    assert not forward_only.requires_grad
    values = query.detach().clone()
    assert RoPEEncodingND.rotate_embeddings(values, angles, forward_only=True, inplace=True) is values
    assert torch.equal(values, expected)


# ---- with the rest of PyTorch


def replicate(module):
    """One replica as torch.nn.parallel.replicate makes it, without a GPU. Its parameters are no leaves."""
    modules = list(module.modules())
    copies = [m._replicate_for_data_parallel() for m in modules]
    for original, replica in zip(modules, copies, strict=True):
        for name, child in original._modules.items():
            replica._modules[name] = copies[modules.index(child)]
        for name, parameter in original._parameters.items():
            setattr(replica, name, parameter.clone())
        for name, buffer in original._buffers.items():
            setattr(replica, name, buffer.clone())
    return copies[0]


@every_group
def test_data_parallel_replicas_work_and_send_gradients_to_the_original(options):
    module = make(**options)
    replica = replicate(module)
    query, positions = torch.randn(2, 5, 24), pixels(2, 5, 3)
    assert not list(replica.parameters())
    rotated = replica(query, positions)
    expected = module(query, positions)
    assert torch.equal(rotated, expected)
    leaves = list(module.parameters())
    actual = torch.autograd.grad(rotated.sin().sum(), leaves)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@tracing
@pytest.mark.parametrize("options", [{}, GROUPS["closure"]], ids=["one group", "closure"])
def test_traced_module_serves_other_shapes_and_can_be_saved(options):
    module = make(**options)
    traced = torch.jit.trace(module, (torch.randn(2, 5, 24), pixels(2, 5, 3)))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    query, positions = torch.randn(3, 7, 24, requires_grad=True), pixels(3, 7, 3)
    expected = module(query, positions)
    for run in (traced, torch.jit.load(file)):
        rotated = run(query, positions)
        assert torch.equal(rotated, expected)
        assert torch.equal(
            torch.autograd.grad(rotated.sin().sum(), query)[0],
            torch.autograd.grad(expected.sin().sum(), query, retain_graph=True)[0],
        )


@tracing
def test_tracing_does_not_look_at_the_positions():
    module = make(forward_only=True)
    normalized = torch.rand(5, 3) * 0.9 + 0.05
    # the check would run the module once more, untraced
    torch.jit.trace(module, (torch.randn(5, 24), normalized), check_trace=False)
    with pytest.warns(UserWarning, match="potentially normalized"):
        module(torch.randn(5, 24), normalized)
