"""RoPEEncodingND: what it is made of and holds, checkpoints, copies and conversions."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from modules import GROUPS, by_complex_numbers, every_group, full_frequencies, group_sizes, make, pixels
from strategies import EMBEDDING_DTYPES, name
from torch import nn

from nd_rotary_encodings import FreqGroupPattern, RoPEEncodingND, get_multilevel_freq_group_pattern

BUFFERS = (
    "freq_group_pattern",
    "encoding_ranges",
    "freq_pos_indices",
    "freq_group_indices",
    "freq_head_indices",
    "freq_enc_indices",
)


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


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
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
    for key, tensor in expected.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor), key
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
