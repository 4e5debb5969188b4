"""RoPEEncodingND: what it holds, computes, writes in place, warns of and keeps for the backward."""

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from nd_rotary_encodings import (
    FreqGroupPattern,
    RoPEEncodingND,
    calculate_rope,
    get_multilevel_freq_group_pattern,
    reference,
    rotate_embeddings,
)

# position_dim 3, 2 heads of 6 pairs
GROUPS = {
    "one group": {},
    "shared heads": {"share_heads": True},
    "partition": {"freq_group_pattern": [[True, True, False], [False, False, True]]},
    "closure": {"freq_group_pattern": [[1, 1, 0], [0, 0, 1], [1, 1, 1]]},
    "a row of False": {"freq_group_pattern": [[True, True, True], [False, False, False]]},
    "only a row of False": {"freq_group_pattern": [[False, False, False]]},
    "an axis unused": {"freq_group_pattern": [[True, False, True]]},
    "equal rows": {"freq_group_pattern": [[1, 0, 1], [1, 0, 1]]},
    "unequal groups": {
        "freq_group_pattern": [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]],
        "enforce_freq_groups_equal": False,
    },
    "groups of one pair": {"freq_group_pattern": [[1, 0, 1], [0, 1, 1]] * 3},
    "more groups than pairs": {"freq_group_pattern": [[1, 1, 1]] * 7, "enforce_freq_groups_equal": False},
    "a theta per group": {"freq_group_pattern": [[1, 1, 0], [1, 1, 1]], "rope_base_theta": [[5.0], [100.0]]},
    "a theta per axis": {"rope_base_theta": torch.tensor([[5.0, 7.0, 11.0]])},
}
# shapes are checked in Python, which the tracer remarks on
tracing = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
every_group = pytest.mark.parametrize("options", GROUPS.values(), ids=GROUPS.keys())
HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float32, torch.float64, *HALF_TYPES)
BUFFERS = (
    "freq_group_pattern",
    "encoding_ranges",
    "freq_pos_indices",
    "freq_group_indices",
    "freq_head_indices",
    "freq_enc_indices",
)


def make(position_dim=3, embed_dim=24, n_heads=2, **options):
    return RoPEEncodingND(position_dim, embed_dim, n_heads, **options)


def pixels(*shape, dtype=torch.float32):
    """Positions in true units, none of which look normalized."""
    return (torch.rand(*shape, dtype=torch.float64) * 20 - 5).to(dtype)


def group_sizes(module):
    size, remainder = divmod(module.head_dim // 2, module.n_freq_groups)
    return [size + 1 if group < remainder else size for group in range(module.n_freq_groups)]


def full_frequencies(module):
    """`[P, H, F]` in numpy: each group's frequencies at its axes and pairs, zero elsewhere."""
    full = np.zeros((module.position_dim, module.n_heads, module.head_dim // 2))
    start = 0
    for row, freqs, size in zip(
        module.freq_group_pattern.tolist(), module.freqs, group_sizes(module), strict=True
    ):
        values = iter(freqs.detach().double().numpy())
        for axis, used in enumerate(row):
            if used:
                full[axis, :, start : start + size] = next(values)
        start += size
    return full


def by_complex_numbers(x, positions, freqs):
    """Pairs of channels as complex numbers, times exp(i angle); all in float64."""
    x, positions = x.detach().double().numpy(), positions.detach().double().numpy()
    angles = np.einsum("...p,phf->...hf", positions, freqs)
    pairs = x.reshape(*x.shape[:-1], *freqs.shape[1:], 2)
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    flat = np.stack([rotated.real, rotated.imag], -1)
    return torch.from_numpy(flat.reshape(*flat.shape[:-3], x.shape[-1]))


def by_reference(module, x, positions):
    """The plain-PyTorch definition on float64 copies, differentiable."""
    freqs = module.grouped_rope_freqs_tensor(module.freqs).sum(1)
    return reference.apply_rope(x.double(), positions.double(), freqs.double(), module.n_heads)


# ---- construction


def test_defaults():
    module = RoPEEncodingND(2, 32, 4)
    assert (module.position_dim, module.embed_dim, module.n_heads, module.head_dim) == (2, 32, 4, 8)
    assert module.n_freq_groups == 1
    assert module.enforce_freq_groups_equal is True
    assert not (module.share_heads or module.use_checkpointing or module.forward_only or module.inplace)
    assert module.dtype == torch.float32
    assert isinstance(module.freqs, nn.ParameterList)
    assert [freqs.shape for freqs in module.freqs] == [(2, 4, 4)]


def test_arguments_become_attributes():
    module = RoPEEncodingND(
        2, 32, 4, True, [[1, 1], [1, 0], [0, 1]], False, 50.0, False, True, True, torch.float64
    )
    assert (module.share_heads, module.enforce_freq_groups_equal, module.use_checkpointing) == (
        True,
        False,
        False,
    )
    assert (module.forward_only, module.inplace, module.dtype) == (True, True, torch.float64)
    assert module.n_freq_groups == 3
    assert RoPEEncodingND(2, 32, 4, use_checkpointing=True).use_checkpointing is True


@every_group
def test_parameter_shapes_are_axes_heads_and_pairs_of_the_group(options):
    module = make(**options)
    axes = module.freq_group_pattern.sum(1).tolist()
    heads = 1 if options.get("share_heads") else 2
    expected = [(count, heads, size) for count, size in zip(axes, group_sizes(module), strict=True)]
    assert [freqs.shape for freqs in module.freqs] == expected
    assert all(isinstance(freqs, nn.Parameter) and freqs.dtype == torch.float32 for freqs in module.freqs)


@every_group
def test_index_buffers_walk_through_groups_axes_heads_and_pairs(options):
    module = make(**options)
    rows, start = [], 0
    for group, size in enumerate(group_sizes(module)):
        assert module.encoding_ranges[group].tolist() == [start, start + size]
        for axis in range(3):
            if module.freq_group_pattern[group, axis]:
                for head in range(1 if options.get("share_heads") else 2):
                    rows += [(axis, group, head, pair) for pair in range(start, start + size)]
        start += size
    index = torch.stack([getattr(module, name) for name in BUFFERS[2:]], dim=-1)
    assert index.tolist() == [list(row) for row in rows]


def test_buffer_dtypes():
    buffers = dict(make(**GROUPS["closure"]).named_buffers())
    assert set(buffers) == set(BUFFERS)
    assert buffers.pop("freq_group_pattern").dtype == torch.bool
    assert {buffer.dtype for buffer in buffers.values()} == {torch.int64}


@pytest.mark.parametrize(
    "pattern",
    [
        [[True, True, False], [False, False, True]],
        np.array([[1, 1, 0], [0, 0, 1]]),
        torch.tensor([[1, 1, 0], [0, 0, 1]], dtype=torch.int32),
        get_multilevel_freq_group_pattern(2, FreqGroupPattern.PARTITION),
    ],
    ids=["lists", "numpy", "int32", "multilevel"],
)
def test_pattern_may_be_anything_that_as_tensor_takes(pattern):
    module = make(freq_group_pattern=pattern)
    assert module.freq_group_pattern.tolist() == [[True, True, False], [False, False, True]]


def test_module_does_not_share_the_pattern_passed_in():
    pattern = torch.tensor([[True, True, False], [False, False, True]])
    module = make(freq_group_pattern=pattern)
    pattern.fill_(False)
    module.reset_parameters()
    assert module.freq_group_pattern.tolist() == [[True, True, False], [False, False, True]]


def test_seed_gives_the_known_frequencies():
    """cos(2 pi u) theta^(-i/2) of the first four numbers of torch's generator at seed 0, by mpmath."""
    torch.manual_seed(0)
    module = RoPEEncodingND(2, 8, 2)
    expected = torch.tensor(
        [
            [[-0.99972340, -0.31614030], [0.11424095, 0.03612616]],
            [[0.84941524, 0.26860868], [0.67519152, 0.21351431]],
        ]
    )
    torch.testing.assert_close(module.freqs[0].detach(), expected, rtol=1e-5, atol=1e-6)


def test_frequencies_decay_by_the_theta_of_their_group_and_axis():
    thetas = [[4.0, 9.0], [16.0, 25.0]]
    module = RoPEEncodingND(2, 12, 1, freq_group_pattern=[[1, 1], [1, 1]], rope_base_theta=thetas)
    for freqs, row in zip(module.freqs, thetas, strict=True):
        for axis, theta in zip(freqs[:, 0], row, strict=True):
            assert (axis[1:] / axis[:-1]).tolist() == pytest.approx([theta ** (-1 / 3)] * 2, rel=1e-5)


def test_dtype_is_that_of_the_frequencies():
    for dtype in FLOAT_TYPES:
        assert {freqs.dtype for freqs in make(dtype=dtype, **GROUPS["partition"]).freqs} == {dtype}


# ---- state


@every_group
def test_state_dict_has_the_keys_of_old_checkpoints(options):
    module = make(**options)
    assert set(module.state_dict()) == {
        *BUFFERS,
        *(f"freqs.{group}" for group in range(module.n_freq_groups)),
    }


@every_group
def test_checkpoint_loads_strictly_and_serves_another_resolution(options):
    trained, fresh = make(**options), make(**options)
    trained(torch.randn(2, 3, 4, 5, 24), trained.position_grid((2, 3, 4, 5, 24)))
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    query = torch.randn(1, 7, 2, 9, 24)
    grid = RoPEEncodingND.position_grid(query.shape)
    assert torch.equal(fresh(query, grid), trained(query, grid))
    torch.testing.assert_close(
        fresh(query, grid).detach().double(),
        by_complex_numbers(query, grid, full_frequencies(trained)),
        rtol=0,
        atol=1e-5,
    )


def test_nothing_is_complex():
    """Gloo and NCCL refuse complex buffers and parameters."""
    for options in GROUPS.values():
        assert not any(tensor.is_complex() for tensor in make(**options).state_dict().values())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
@every_group
def test_copies_are_equal_and_independent(options, copied):
    module = make(**options)
    twin = copied(module)
    query, positions = torch.randn(5, 24), pixels(5, 3)
    before = module(query, positions)
    assert torch.equal(twin(query, positions), before)
    twin.reset_parameters()
    assert torch.equal(module(query, positions), before)
    twin.load_state_dict(module.state_dict())
    assert repr(twin) == repr(module)


def test_whole_module_survives_torch_save():
    module, file = make(**GROUPS["closure"]), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    query, positions = torch.randn(5, 24), pixels(5, 3)
    assert torch.equal(torch.load(file, weights_only=False)(query, positions), module(query, positions))


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_conversion_leaves_the_index_buffers_alone(dtype):
    module = make(**GROUPS["closure"]).to(dtype)
    assert {freqs.dtype for freqs in module.freqs} == {dtype}
    assert [getattr(module, name).dtype for name in BUFFERS] == [torch.bool] + [torch.int64] * 5


def test_reset_restores_what_half_precision_lost():
    torch.manual_seed(7)
    module = make()
    drawn = module.freqs[0].detach().clone()
    module.bfloat16().float()
    assert not torch.equal(module.freqs[0], drawn)
    torch.manual_seed(7)
    module.reset_parameters()
    assert torch.equal(module.freqs[0], drawn)


def test_reset_is_in_place_and_draws_anew():
    module = make(**GROUPS["partition"])
    parameters, addresses = list(module.freqs), [freqs.data_ptr() for freqs in module.freqs]
    before = [freqs.detach().clone() for freqs in parameters]
    module.reset_parameters()
    assert all(a is b for a, b in zip(parameters, module.freqs, strict=True))
    assert [freqs.data_ptr() for freqs in module.freqs] == addresses
    assert not any(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


@every_group
def test_module_made_on_meta_is_valid_after_to_empty_and_reset(options):
    torch.manual_seed(11)
    expected = make(**options)
    with torch.device("meta"):
        module = make(**options)
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(1)
    torch.manual_seed(11)
    module.reset_parameters()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    query, positions = torch.randn(2, 5, 24), pixels(2, 5, 3)
    assert torch.equal(module(query, positions), expected(query, positions))


def test_extra_repr_shows_the_configuration():
    text = make(share_heads=True, freq_group_pattern=[[1, 1, 0], [0, 0, 1]], dtype=torch.float64).extra_repr()
    for part in (
        "position_dim=3",
        "embed_dim=24",
        "n_heads=2",
        "head_dim=12",
        "share_heads=True",
        "n_freq_groups=2",
        "dtype=torch.float64",
    ):
        assert part in text
    assert "forward_only=True" in make(forward_only=True).extra_repr()
    assert "inplace=True" in make(forward_only=True, inplace=True).extra_repr()
    assert "use_checkpointing=True" in make(use_checkpointing=True).extra_repr()


def test_no_weight_decay_names_every_parameter():
    for options in GROUPS.values():
        module = make(**options)
        assert module.no_weight_decay() == {name for name, _ in module.named_parameters()}


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
    for query_type in FLOAT_TYPES:
        for key_type in FLOAT_TYPES:
            for position_type in (torch.int32, torch.float16, torch.float64):
                query, key = torch.randn(4, 24).to(query_type), torch.randn(4, 24).to(key_type)
                positions = pixels(4, 3).to(position_type)
                rotated = module(query, positions, key)
                assert [x.dtype for x in rotated] == [query_type, key_type]
                for before, after in zip((query, key), rotated, strict=True):
                    expected = by_complex_numbers(before, positions, full_frequencies(module))
                    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(before.dtype, 4e-6)
                    torch.testing.assert_close(after.detach().double(), expected, rtol=0, atol=tolerance)


def test_integer_positions_keep_their_precision():
    """2^24 + 1 is no float32; and the frequencies are exact."""
    module = RoPEEncodingND(1, 2, 1)
    nn.init.constant_(module.freqs[0], 0.5)
    rotated = module(torch.tensor([[1.0, 0.0]]), torch.tensor([[2**24 + 1]]))
    angle = (2**24 + 1) / 2
    assert rotated[0].tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)


def test_autocast_changes_nothing():
    module = make()
    query, positions = (
        torch.randn(8, 8, 24, requires_grad=True),
        RoPEEncodingND.position_grid((1, 8, 8, 1)) + 65536,
    )
    positions = torch.cat([positions, positions[..., :1]], -1).float().requires_grad_()
    leaves = [query, positions, *module.parameters()]
    expected = module(query, positions)
    expected_grads = torch.autograd.grad(expected.sin().sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        actual = module(query, positions)
        actual_grads = torch.autograd.grad(actual.sin().sum(), leaves)
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(actual_grads, expected_grads, strict=True))


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


# ---- forward_only and in place


def test_forward_only_records_nothing():
    module = make(forward_only=True)
    rotated = module(torch.randn(5, 24), pixels(5, 3), torch.randn(5, 24))
    assert all(x.grad_fn is None and not x.requires_grad for x in rotated)


def _slice_of_projection(values):
    buffer = torch.full((*values.shape[:-1], 3 * values.shape[-1]), math.nan, dtype=values.dtype)
    return buffer, buffer[..., 24:48]


def _transposed(values):
    buffer = torch.full((values.shape[1], values.shape[0], 24), math.nan, dtype=values.dtype)
    return buffer, buffer.transpose(0, 1)


def _every_other_channel(values):
    buffer = torch.full((*values.shape[:-1], 48), math.nan, dtype=values.dtype)
    return buffer, buffer[..., ::2]


def _every_other_token(values):
    buffer = torch.full((values.shape[0], 2 * values.shape[1], 24), math.nan, dtype=values.dtype)
    return buffer, buffer[:, 1::2]


def _odd_offset(values):
    buffer = torch.full((values.numel() + 3,), math.nan, dtype=values.dtype)
    return buffer, buffer[1:-2].view(values.shape)


def _channels_outside(values):
    buffer = torch.full((24, *values.shape[:-1]), math.nan, dtype=values.dtype)
    return buffer, buffer.permute(1, 2, 0)


LAYOUTS = [
    _slice_of_projection,
    _transposed,
    _every_other_channel,
    _every_other_token,
    _odd_offset,
    _channels_outside,
]


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_writes_the_callers_memory_and_nothing_beside_it(layout, dtype):
    torch.manual_seed(0)
    module = make(forward_only=True, inplace=True)
    torch.manual_seed(0)
    out_of_place = make(forward_only=True)
    values, positions = torch.randn(3, 5, 24).to(dtype), pixels(3, 5, 3)
    buffer, query = layout(values)
    query.copy_(values)
    outside = buffer.isnan().sum()
    version, address = query._version, query.data_ptr()
    rotated = module(query, positions)
    assert rotated is query
    assert query.data_ptr() == address
    assert torch.equal(query, out_of_place(values, positions))
    assert not torch.equal(query, values)
    assert buffer.isnan().sum() == outside == buffer.numel() - values.numel()
    assert query._version > version


def test_in_place_returns_query_and_key_themselves():
    module = make(forward_only=True, inplace=True)
    query, key, query_pos, key_pos = torch.randn(5, 24), torch.randn(7, 24).half(), pixels(5, 3), pixels(7, 3)
    expected = [
        by_complex_numbers(x, p, full_frequencies(module)) for x, p in ((query, query_pos), (key, key_pos))
    ]
    versions = query._version, key._version
    rotated = module(query, query_pos, key, key_pos)
    assert rotated[0] is query
    assert rotated[1] is key
    torch.testing.assert_close(query.double(), expected[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(key.double(), expected[1], rtol=0, atol=4e-3)
    assert query._version > versions[0]
    assert key._version > versions[1]


def test_in_place_positions_may_broadcast():
    module = make(forward_only=True, inplace=True)
    query, positions = torch.randn(4, 5, 24), pixels(5, 3)
    expected = by_complex_numbers(query, positions, full_frequencies(module))
    torch.testing.assert_close(module(query, positions).double(), expected, rtol=0, atol=4e-6)


def test_autograd_notices_that_a_saved_tensor_was_rotated_in_place():
    module = make(forward_only=True, inplace=True)
    weight = torch.randn(5, 24, requires_grad=True)
    query = torch.randn(5, 24)
    product = weight * query
    module(query, pixels(5, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def _neighbors(shift):
    """Query and key as slices of 24 channels of one buffer, the key `shift` channels after the query."""
    buffer = torch.randn(2, 5, 100)
    return buffer, buffer[..., 10:34], buffer[..., 10 + shift : 34 + shift]


def _swapped(shift):
    buffer, query, key = _neighbors(shift)
    return buffer, key, query


def _packed():
    buffer = torch.randn(2, 5, 72)
    query, key, _ = buffer.chunk(3, dim=-1)
    return buffer, query, key


def _interleaved_channels():
    buffer = torch.randn(2, 5, 48)
    return buffer, buffer[..., ::2], buffer[..., 1::2]


def _interleaved_tokens():
    buffer = torch.randn(2, 10, 24)
    return buffer, buffer[:, ::2], buffer[:, 1::2]


def _interleaved_in_different_shapes():
    buffer = torch.randn(2, 15, 24)
    return buffer, buffer[:, ::3], buffer[:, 1::2][:, ::3][:, :2]


def _two_types():
    buffer = torch.randn(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., 48:72].fill_(0.5)


def _two_types_with_steps():
    buffer = torch.randn(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., 48::2].fill_(0.5)


DISJOINT = {
    "packed projection": _packed,
    "side by side": lambda: _neighbors(24),
    "side by side, key first": lambda: _swapped(24),
    "interleaved channels": _interleaved_channels,
    "interleaved tokens": _interleaved_tokens,
    "interleaved tokens, different shapes": _interleaved_in_different_shapes,
    "two dtypes": _two_types,
    "two dtypes, one with steps": _two_types_with_steps,
}


@pytest.mark.parametrize("slices", DISJOINT.values(), ids=DISJOINT.keys())
def test_in_place_on_disjoint_parts_of_one_buffer(slices):
    buffer, query, key = slices()
    module = make(forward_only=True, inplace=True)
    query_pos, key_pos = pixels(*query.shape[:-1], 3), pixels(*key.shape[:-1], 3)
    freqs = full_frequencies(module)
    expected = by_complex_numbers(query, query_pos, freqs), by_complex_numbers(key, key_pos, freqs)
    copy_of_buffer = buffer.clone()
    module(query, query_pos, key, key_pos)
    torch.testing.assert_close(query.double(), expected[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(
        key.double(), expected[1], rtol=0, atol=4e-6 if key.dtype == torch.float32 else 4e-3
    )
    if slices is _packed:
        assert torch.equal(buffer[..., 48:], copy_of_buffer[..., 48:])


def _key_of_another_dtype(start):
    buffer = torch.ones(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., start : start + 24]


def _key_of_another_dtype_with_steps():
    buffer = torch.ones(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., 40:88:2]


def _sharing_numpy_memory():
    array = np.ones(2 * 5 * 24 + 24, dtype=np.float32)
    query, key = torch.from_numpy(array[:-24]).view(2, 5, 24), torch.from_numpy(array[24:]).view(2, 5, 24)
    return torch.from_numpy(array), query, key


OVERLAPPING = {
    "the same tensor": lambda: (lambda x: (x, x, x))(torch.randn(2, 5, 24)),
    "views of one tensor": lambda: (lambda x: (x, x[:], x.view(2, 5, 24)))(torch.randn(2, 5, 24)),
    "one channel": lambda: _neighbors(23),
    "one channel, key first": lambda: _swapped(23),
    "reversed tokens": lambda: (lambda x: (x, x[:, :3], x[:, 2:]))(torch.randn(2, 5, 24)),
    "transposed": lambda: (lambda x: (x, x, x.transpose(0, 1)))(torch.randn(5, 5, 24)),
    "steps that meet": lambda: (lambda x: (x, x[:, ::2], x[:, ::3][:, :5]))(torch.randn(2, 15, 24)),
    "another dtype": lambda: _key_of_another_dtype(47),
    "another dtype with steps": _key_of_another_dtype_with_steps,
    "memory of one numpy array": _sharing_numpy_memory,
}


@pytest.mark.parametrize("slices", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_in_place_refuses_a_key_that_overlaps_the_query_and_writes_nothing(slices):
    buffer, query, key = slices()
    before, version = buffer.clone(), buffer._version
    with pytest.raises(ValueError, match="query and key to share no memory"):
        make(forward_only=True, inplace=True)(
            query, pixels(*query.shape[:-1], 3), key, pixels(*key.shape[:-1], 3)
        )
    assert torch.equal(buffer, before)
    assert buffer._version == version


def test_overlap_of_query_and_key_is_fine_out_of_place():
    module, query, positions = make(), torch.randn(5, 24), pixels(5, 3)
    assert torch.equal(*module(query, positions, query))


@pytest.mark.parametrize(
    ("shape", "position_shape", "message"),
    [
        ((1, 5, 24), (4, 5, 3), "query needs the full shape"),
        ((5, 24), (4, 5, 3), "query needs the full shape"),
    ],
)
def test_in_place_refuses_to_broadcast_the_query(shape, position_shape, message):
    query = torch.randn(shape)
    before = query.clone()
    with pytest.raises(ValueError, match=message):
        make(forward_only=True, inplace=True)(query, pixels(*position_shape))
    assert torch.equal(query, before)


def _expanded():
    buffer = torch.randn(5, 24)
    return buffer, buffer.expand(4, 5, 24)


def _sliding_windows():
    buffer = torch.randn(200)
    return buffer, buffer.unfold(0, 24, 12)


@pytest.mark.parametrize("make_query", [_expanded, _sliding_windows])
def test_in_place_refuses_a_query_whose_elements_share_memory(make_query):
    buffer, query = make_query()
    before = buffer.clone()
    with pytest.raises(ValueError, match="each element of query to have memory of its own"):
        make(forward_only=True, inplace=True)(query, pixels(*query.shape[:-1], 3))
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("fault", ["shape", "dtype", "expanded", "positions"])
def test_in_place_leaves_the_query_alone_where_the_key_is_wrong(fault):
    query, key, key_pos = torch.randn(5, 24), torch.randn(5, 24), pixels(5, 3)
    if fault == "shape":
        key = torch.randn(5, 22)
    elif fault == "dtype":
        key = torch.ones(5, 24, dtype=torch.int32)
    elif fault == "expanded":
        key = torch.randn(24).expand(5, 24)
    else:
        key_pos = pixels(4, 3)
    before = query.clone()
    with pytest.raises(ValueError, match="key"):
        make(forward_only=True, inplace=True)(query, pixels(5, 3), key, key_pos)
    assert torch.equal(query, before)


def test_in_place_refuses_a_leaf_that_requires_grad():
    """As PyTorch's own in-place operations do; under no_grad it is allowed."""
    module = make(forward_only=True, inplace=True)
    query, positions = torch.randn(5, 24, requires_grad=True), pixels(5, 3)
    before = query.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            module(query, positions)
    assert torch.equal(query, before)
    with torch.no_grad():
        assert module(query, positions) is query
    assert not torch.equal(query, before)


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


# ---- packed projections


@every_group
def test_packed_projection_is_rotated_as_its_queries_and_keys(options):
    module, positions, gradient = make(**options), pixels(2, 5, 3), torch.randn(2, 5, 72)
    qkv = torch.randn(2, 5, 72, requires_grad=True)
    query, key = module(qkv[..., :24], positions, qkv[..., 24:48])
    expected = torch.cat((query, key, qkv[..., 48:]), -1)
    leaves = [qkv, *module.parameters()]
    expected_gradients = torch.autograd.grad(expected, leaves, gradient)
    actual = module.rotate_qkv_(qkv * 1, positions)
    assert torch.equal(actual, expected)
    actual_gradients = torch.autograd.grad(actual, leaves, gradient)
    assert torch.equal(actual_gradients[0], expected_gradients[0])
    for a, b in zip(actual_gradients[1:], expected_gradients[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_packed_projection_is_rotated_in_place(grad):
    module, projection = make(), torch.nn.Linear(24, 72)
    with torch.set_grad_enabled(grad):
        qkv = projection(torch.randn(2, 5, 24))
        version, before = qkv._version, qkv.detach().clone()
        rotated = module.rotate_qkv_(qkv, pixels(5, 3))
    assert rotated.data_ptr() == qkv.data_ptr()
    assert torch.equal(rotated, qkv)
    assert qkv._version > version
    assert not torch.equal(rotated[..., :24], before[..., :24])
    assert torch.equal(rotated[..., 48:], before[..., 48:])


def test_packed_projection_itself_is_part_of_the_graph_after_its_rotation():
    """Who goes on with the tensor passed in gets the same gradients as who takes the result."""
    module, weight, positions = make(), torch.randn(72, 24, requires_grad=True), pixels(5, 3)
    gradients = []
    for use_result in (True, False):
        qkv = torch.nn.functional.linear(torch.ones(2, 5, 24), weight, torch.zeros(72))
        rotated = module.rotate_qkv_(qkv, positions)
        used = rotated if use_result else qkv
        gradients.append(torch.autograd.grad(used.sin().sum(), [weight, *module.parameters()]))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_forward_only_packed_projection_is_detached_from_the_frequencies():
    module, qkv = make(forward_only=True), torch.randn(5, 72)
    assert not module.rotate_qkv_(qkv, pixels(5, 3)).requires_grad
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        module.rotate_qkv_(torch.randn(5, 72, requires_grad=True), pixels(5, 3))


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


def test_static_calculate_rope_is_the_function():
    positions, freqs = pixels(2, 5, 3), torch.randn(3, 2, 2, 6)
    assert torch.equal(RoPEEncodingND.calculate_rope(positions, freqs), calculate_rope(positions, freqs))


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
