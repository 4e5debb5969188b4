"""Frequency groups and positions for feature maps of several levels."""

import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nd_rotary_encodings.frequencies import init_nd_freqs
from nd_rotary_encodings.multilevel import (
    FreqGroupPattern,
    get_multilevel_freq_group_pattern,
    prep_multilevel_positions,
)

PATTERNS = {
    "single": [[1, 1, 1]],
    "partition": [[1, 1, 0], [0, 0, 1]],
    "closure": [[1, 1, 0], [0, 0, 1], [1, 1, 1]],
}
SHAPES = torch.tensor([[64, 48], [32, 24], [16, 6]])


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    pattern = get_multilevel_freq_group_pattern(2, name)
    assert pattern.dtype == torch.get_default_dtype()
    assert pattern.tolist() == PATTERNS[name]
    assert torch.equal(get_multilevel_freq_group_pattern(2, FreqGroupPattern(name)), pattern)
    assert get_multilevel_freq_group_pattern(2, name, device="meta").device.type == "meta"


@given(st.integers(1, 6), st.sampled_from(FreqGroupPattern))
def test_patterns_of_any_dimension_suit_init_nd_freqs(position_dim, name):
    pattern = get_multilevel_freq_group_pattern(position_dim, name)
    freqs, _ = init_nd_freqs(position_dim + 1, 12, 2, pattern)
    axes_of_groups = {
        "single": [position_dim + 1],
        "partition": [position_dim, 1],
        "closure": [position_dim, 1, position_dim + 1],
    }
    assert [f.shape[0] for f in freqs] == axes_of_groups[str(name)]


def test_pattern_names():
    assert {member.name: member.value for member in FreqGroupPattern} == {
        "SINGLE": "single",
        "PARTITION": "partition",
        "CLOSURE": "closure",
    }
    assert f"{FreqGroupPattern.CLOSURE}" == "closure"
    assert pickle.loads(pickle.dumps(FreqGroupPattern.CLOSURE)) is FreqGroupPattern.CLOSURE


@pytest.mark.parametrize("name", ["Single", "", None, ["single"]])
def test_unknown_pattern(name):
    message = f"Unrecognized pattern_name {name!r}, expected one of 'single', 'partition', 'closure'"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        get_multilevel_freq_group_pattern(2, name)


def test_pattern_needs_a_spatial_axis():
    with pytest.raises(ValueError, match=r"^Expected position_dim to be at least 1, got 0"):
        get_multilevel_freq_group_pattern(0, "single")


def test_golden_positions():
    positions = torch.tensor([[10, 20], [5, 15], [3, 2]])
    out = prep_multilevel_positions(positions, torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]), SHAPES)
    assert out.dtype == torch.float32
    assert out.tolist() == [[10.5, 20.5, 0], [11, 31, 1], [14, 20, 2]]


def test_golden_positions_of_shapes_that_differ_between_batch_elements():
    positions = torch.tensor([[10, 20], [10, 30], [50, 25], [75, 30]])
    batch, level = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    shapes = torch.tensor([[[100, 100], [50, 25]], [[100, 300], [300, 100]]])
    out = prep_multilevel_positions(positions, batch, level, shapes)
    assert out.tolist() == [[10.5, 20.5, 0], [21, 122, 1], [151.5, 25.5, 0], [75.5, 91.5, 1]]


@given(st.data())
def test_any_position_follows_the_formula(data):
    position_dim, n_levels, n_batch = (data.draw(st.integers(1, high)) for high in (3, 4, 3))
    leading = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    batched = data.draw(st.booleans())
    counts_cells = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    shapes = torch.randint(1, 200, (n_batch, n_levels, position_dim), generator=generator)
    if not batched:
        shapes = shapes[:1]
    batch = torch.randint(n_batch, leading, generator=generator)
    level = torch.randint(n_levels, leading, generator=generator)
    positions = torch.randint(-50, 500, (*leading, position_dim), generator=generator)
    if not counts_cells:
        positions = positions.double() / 7

    out = prep_multilevel_positions(positions, batch, level, shapes if batched else shapes[0])

    assert out.shape == (*leading, position_dim + 1)
    assert out.dtype == (torch.float32 if counts_cells else torch.float64)
    rows = zip(
        positions.reshape(-1, position_dim).tolist(),
        batch.flatten().tolist(),
        level.flatten().tolist(),
        out.reshape(-1, position_dim + 1).tolist(),
        strict=True,
    )
    for position, b, lvl, row in rows:
        sizes = shapes[b if batched else 0].tolist()
        for axis in range(position_dim):
            scale = sizes[lvl][axis] / max(size[axis] for size in sizes)
            wanted = (position[axis] + 0.5 * counts_cells) / scale
            assert row[axis] == pytest.approx(wanted, rel=3e-7 if counts_cells else 1e-15)
        assert row[-1] == lvl


@given(st.integers(0, 15), st.integers(0, 5), st.integers(0, 2))
def test_cells_are_half_a_cell_from_equal_coordinates(row, column, level):
    cell = torch.tensor([[row, column]])
    indices = torch.tensor([0]), torch.tensor([level])
    from_cells = prep_multilevel_positions(cell, *indices, SHAPES)
    from_floats = prep_multilevel_positions(cell.float(), *indices, SHAPES)
    half_a_cell = 0.5 * SHAPES[0] / SHAPES[level]
    assert torch.equal((from_cells - from_floats)[0, :2], half_a_cell)
    assert torch.equal(from_cells, prep_multilevel_positions(cell + 0.5, *indices, SHAPES))


def test_the_far_corner_is_the_same_on_every_level():
    out = prep_multilevel_positions(
        SHAPES.float(), torch.zeros(3, dtype=torch.int64), torch.arange(3), SHAPES
    )
    assert out[:, :2].tolist() == [[64, 48]] * 3


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 0), (torch.bfloat16, 0), (torch.float32, 2e-7), (torch.float64, 4e-16)],
)
@pytest.mark.parametrize("shapes_dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_float_positions_keep_their_dtype_and_are_rounded_once(dtype, tolerance, shapes_dtype):
    shapes = torch.tensor([[300, 300], [70, 90]], dtype=shapes_dtype)
    positions = (torch.arange(200).reshape(100, 2) / 7).to(dtype)
    level = torch.arange(100) % 2
    out = prep_multilevel_positions(positions, level, level, shapes)
    exact = positions.double() * 300 / shapes[level].double()
    torch.testing.assert_close(out[:, :2], exact.to(dtype), rtol=tolerance, atol=0)


def test_float64_shapes_keep_their_precision():
    # In float32 these would be 2**24 + 4 and 2**24
    shapes = torch.tensor([[2**24 + 3], [2**24 + 1]], dtype=torch.float64)
    index = torch.tensor([1])
    out = prep_multilevel_positions(torch.ones(1, 1), index, index, shapes)
    assert out[0, 0].item() == 1 + 2**-23


def test_integer_positions_become_the_default_dtype():
    before = torch.get_default_dtype()
    index = torch.tensor([0])
    torch.set_default_dtype(torch.float64)
    try:
        out = prep_multilevel_positions(torch.tensor([[2**40, 3]]), index, index, SHAPES)
    finally:
        torch.set_default_dtype(before)
    assert out.dtype == torch.float64
    assert out[0, 0].item() == 2**40 + 0.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_integer_type_serves(dtype):
    positions = torch.tensor([[5, 2], [7, 4]], dtype=dtype)
    index = torch.tensor([0, 2], dtype=dtype)
    wanted = [[5.5, 2.5, 0], [30, 36, 2]]
    for shapes in (SHAPES, SHAPES.expand(3, 3, 2)):
        assert prep_multilevel_positions(positions, index, index, shapes).tolist() == wanted


def test_indices_of_size_1_broadcast():
    positions = torch.rand(4, 5, 2)
    batch, level = torch.arange(4)[:, None], torch.arange(5)[None] % 3
    shapes = torch.randint(1, 50, (4, 3, 2))
    out = prep_multilevel_positions(positions, batch, level, shapes)
    full = prep_multilevel_positions(positions, batch.repeat(1, 5), level.repeat(4, 1), shapes)
    assert torch.equal(out, full)


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES.expand(2, 3, 2), SHAPES.expand(0, 3, 2)])
def test_empty_input(leading, dtype, shapes):
    index = torch.zeros(leading)  # float, as torch.tensor([]) is
    out = prep_multilevel_positions(torch.zeros(*leading, 2, dtype=dtype), index, index, shapes)
    assert out.shape == (*leading, 3)
    assert out.dtype == (torch.float32 if dtype == torch.int64 else dtype)


def test_inputs_are_not_modified():
    inputs = (torch.rand(3, 2), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]), SHAPES.float())
    copies = [tensor.clone() for tensor in inputs]
    prep_multilevel_positions(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_gradients_reach_positions_and_shapes():
    positions = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    shapes = SHAPES.double().requires_grad_()
    index = torch.arange(3)
    assert torch.autograd.gradcheck(
        lambda p, s: prep_multilevel_positions(p, index, index, s), (positions, shapes)
    )


@pytest.mark.parametrize("batched", [False, True])
def test_values_are_never_fetched_from_the_device(batched):
    # A meta tensor has none to fetch
    positions = torch.empty(4, 5, 2, device="meta")
    index = torch.empty(4, 5, dtype=torch.int64, device="meta")
    shapes = torch.empty((4, 3, 2) if batched else (3, 2), dtype=torch.int64, device="meta")
    assert prep_multilevel_positions(positions, index, index, shapes).shape == (4, 5, 3)


def test_out_of_range_indices_raise():
    positions, zero, three = torch.zeros(1, 2), torch.tensor([0]), torch.tensor([3])
    with pytest.raises(IndexError):
        prep_multilevel_positions(positions, zero, three, SHAPES)
    with pytest.raises(IndexError):
        prep_multilevel_positions(positions, three, zero, SHAPES.expand(2, 3, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spatial_positions": torch.zeros(2)},
            "Expected at least 2 dimensions for spatial_positions, got shape (2,)",
        ),
        (
            {"spatial_positions": torch.zeros(4, 2, dtype=torch.complex64)},
            "Expected spatial_positions to be real, got dtype torch.complex64",
        ),
        (
            {"level_spatial_shapes": SHAPES.to(torch.complex64)},
            "Expected level_spatial_shapes to be real, got dtype torch.complex64",
        ),
        (
            {"level_spatial_shapes": SHAPES[0]},
            "Expected level_spatial_shapes to be [n_levels, P] or [batch, n_levels, P], where P is the last "
            "dim of spatial_positions (2), got shape (2,)",
        ),
        (
            {"level_spatial_shapes": SHAPES.expand(1, 1, 3, 2)},
            "Expected level_spatial_shapes to be [n_levels, P] or [batch, n_levels, P], where P is the last "
            "dim of spatial_positions (2), got shape (1, 1, 3, 2)",
        ),
        (
            {"level_spatial_shapes": SHAPES[:, :1]},
            "Expected level_spatial_shapes to be [n_levels, P] or [batch, n_levels, P], where P is the last "
            "dim of spatial_positions (2), got shape (3, 1)",
        ),
        (
            {"level_spatial_shapes": SHAPES[:0]},
            "Expected level_spatial_shapes to have at least one level, got shape (0, 2)",
        ),
        *(
            row
            for name in ("batch_indices", "level_indices")
            for row in (
                (
                    {name: torch.zeros(4, 1, dtype=torch.int64)},
                    f"Expected {name} to have the leading dims of spatial_positions (4,), or 1 in their "
                    "place, got shape (4, 1)",
                ),
                (
                    {name: torch.zeros(3, dtype=torch.int64)},
                    f"Expected {name} to have the leading dims of spatial_positions (4,), or 1 in their "
                    "place, got shape (3,)",
                ),
                (
                    {name: torch.zeros(4)},
                    f"Expected {name} to be of an integer type, got dtype torch.float32",
                ),
                (
                    {name: torch.zeros(4, dtype=torch.bool)},
                    f"Expected {name} to be of an integer type, got dtype torch.bool",
                ),
                (
                    {name: torch.zeros(4, dtype=torch.complex64)},
                    f"Expected {name} to be of an integer type, got dtype torch.complex64",
                ),
            )
        ),
    ],
)
def test_error_texts(changes, message):
    valid = {
        "spatial_positions": torch.zeros(4, 2),
        "batch_indices": torch.zeros(4, dtype=torch.int64),
        "level_indices": torch.zeros(4, dtype=torch.int64),
        "level_spatial_shapes": SHAPES,
    }
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        prep_multilevel_positions(**{**valid, **changes})
