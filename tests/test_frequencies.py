"""Initial frequencies: values, order of the random draws, groups, devices, error texts."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nd_rotary_encodings.frequencies import (
    group_sizes,
    init_2d_freqs_rope_mixed,
    init_nd_freqs,
    read_freq_group_pattern,
)

# torch.rand(1) on the CPU after torch.manual_seed(0), one call after another
SEED_0_DRAWS = [0.4962565899, 0.7682217956, 0.0884774327, 0.1320304871, 0.3074228168, 0.6340786815]
SHARED_AXIS = [[True, True, False], [False, True, True]]


def expected_freqs(pattern, sizes, num_heads, thetas, angles):
    """The formula in Python floats; `angles` is an iterator over u in the order of drawing."""
    freqs = []
    for row, bases, size in zip(pattern, thetas, sizes, strict=True):
        freqs.append(
            [
                [[math.cos(u) * base ** (-i / size) for i in range(size)] for u in heads]
                for base, heads in (
                    (base, [next(angles) for _ in range(num_heads)])
                    for uses_axis, base in zip(row, bases, strict=True)
                    if uses_axis
                )
            ]
        )
    return freqs


def assert_freqs(actual, expected, num_heads, sizes, dtype=torch.float32, tolerance=1e-6):
    assert len(actual) == len(expected)
    for tensor, values, size in zip(actual, expected, sizes, strict=True):
        wanted = torch.tensor(values, dtype=torch.float64).reshape(len(values), num_heads, size)
        assert tensor.shape == wanted.shape
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor.double(), wanted, rtol=tolerance, atol=tolerance)


@st.composite
def configurations(draw):
    position_dim = draw(st.integers(1, 4))
    rows = st.lists(st.booleans(), min_size=position_dim, max_size=position_dim)
    pattern = draw(st.lists(rows, min_size=1, max_size=4))
    bases = st.floats(1.5, 1e4, width=32)
    thetas = draw(
        st.lists(
            st.lists(bases, min_size=position_dim, max_size=position_dim),
            min_size=len(pattern),
            max_size=len(pattern),
        )
    )
    return {
        "position_dim": position_dim,
        "head_dim": 2 * draw(st.integers(1, 20)),
        "num_heads": draw(st.integers(1, 5)),
        "freq_group_pattern": pattern,
        "enforce_freq_groups_equal": False,
        "thetas": thetas,
    }


@given(configurations(), st.integers(0, 2**32 - 1))
def test_any_configuration_follows_the_formula_and_the_order_of_draws(config, seed):
    torch.manual_seed(seed)
    freqs, ranges = init_nd_freqs(**config, dtype=torch.float64)
    after = torch.rand(1)

    torch.manual_seed(seed)
    draws = (2 * math.pi * torch.rand(1, dtype=torch.float64).item() for _ in iter(int, 1))
    sizes = [end - start for start, end in ranges.tolist()]
    expected = expected_freqs(
        config["freq_group_pattern"], sizes, config["num_heads"], config["thetas"], draws
    )
    assert_freqs(freqs, expected, config["num_heads"], sizes, torch.float64, 1e-12)
    assert torch.equal(torch.rand(1), after), "as many draws as frequencies' directions, no more"


@given(configurations())
def test_ranges_deal_out_every_pair_once_and_in_order(config):
    freqs, ranges = init_nd_freqs(**config)
    assert ranges.dtype == torch.int64
    assert ranges.shape == (len(config["freq_group_pattern"]), 2)
    dealt = [pair for start, end in ranges.tolist() for pair in range(start, end)]
    assert dealt == list(range(config["head_dim"] // 2))
    assert [f.shape[-1] for f in freqs] == (ranges[:, 1] - ranges[:, 0]).tolist()


@given(configurations(), st.integers(0, 99))
def test_axes_that_a_group_lacks_change_nothing(config, seed):
    others = [
        [base if uses_axis else math.nan for uses_axis, base in zip(row, bases, strict=True)]
        for row, bases in zip(config["freq_group_pattern"], config["thetas"], strict=True)
    ]
    torch.manual_seed(seed)
    freqs, _ = init_nd_freqs(**config)
    torch.manual_seed(seed)
    again, _ = init_nd_freqs(**{**config, "thetas": others})
    assert all(torch.equal(a, b) for a, b in zip(freqs, again, strict=True))


def test_golden_draws_of_seed_0():
    torch.manual_seed(0)
    freqs, _ = init_nd_freqs(3, 8, 2, [[True, False, True], [False, True, False]], dtype=torch.float32)
    cosines = [math.cos(2 * math.pi * u) for u in SEED_0_DRAWS]
    # group 0, axis 0, heads 0 and 1; group 0, axis 2, ...; group 1, axis 1, ...; pair 0 has magnitude 1
    torch.testing.assert_close(freqs[0][..., 0].flatten(), torch.tensor(cosines[:4]))
    torch.testing.assert_close(freqs[1][..., 0].flatten(), torch.tensor(cosines[4:]))


def test_golden_magnitudes():
    freqs, ranges = init_nd_freqs(1, 64, 1, [[True]], rotate=False)
    assert ranges.tolist() == [[0, 32]]
    wanted = torch.tensor([1, 0.93057, 0.86596, 0.10746])
    torch.testing.assert_close(freqs[0][0, 0, [0, 1, 2, 31]], wanted, rtol=0, atol=5e-6)


def test_magnitudes_decay_over_the_pairs_of_each_group_anew():
    freqs, _ = init_nd_freqs(2, 64, 2, [[True, True], [False, True]], rotate=False)
    for group in freqs:
        wanted = torch.tensor([10 ** (-i / 16) for i in range(16)])
        torch.testing.assert_close(group, wanted.expand_as(group))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bitwise_equal_to_one_tensor_operation_at_a_time(dtype):
    theta = torch.tensor([[3.5, 100.0, 10.0]])
    torch.manual_seed(3)
    freqs, _ = init_nd_freqs(3, 48, 9, [[True, False, True]], thetas=theta, dtype=dtype)
    torch.manual_seed(3)
    exponents = -torch.arange(24, dtype=dtype) / 24
    for row, axis in enumerate((0, 2)):
        for head in range(9):
            cosine = torch.cos(torch.rand(1, dtype=dtype) * (2 * math.pi))
            assert torch.equal(freqs[0][row, head], cosine * theta[0, axis].to(dtype) ** exponents)


def test_unequal_groups_give_the_first_ones_more():
    freqs, ranges = init_nd_freqs(3, 14, 2, SHARED_AXIS, enforce_freq_groups_equal=False)
    assert [f.shape for f in freqs] == [(2, 2, 4), (2, 2, 3)]
    assert ranges.tolist() == [[0, 4], [4, 7]]


def test_more_groups_than_pairs_leaves_the_last_ones_empty():
    freqs, ranges = init_nd_freqs(1, 4, 2, [[True]] * 3, enforce_freq_groups_equal=False)
    assert [f.shape for f in freqs] == [(1, 2, 1), (1, 2, 1), (1, 2, 0)]
    assert ranges.tolist() == [[0, 1], [1, 2], [2, 2]]


def test_row_of_false_has_pairs_but_no_frequencies_and_draws_nothing():
    torch.manual_seed(0)
    freqs, ranges = init_nd_freqs(1, 8, 1, [[False], [True]])
    assert [f.shape for f in freqs] == [(0, 1, 2), (1, 1, 2)]
    assert ranges.tolist() == [[0, 2], [2, 4]]
    assert freqs[1][0, 0, 0].item() == pytest.approx(math.cos(2 * math.pi * SEED_0_DRAWS[0]), abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_every_axis_has_nonzero_frequencies_for_every_head(seed):
    torch.manual_seed(seed)
    freqs, _ = init_nd_freqs(3, 24, 8, [[True, True, True], [True, False, True], [False, True, False]])
    for group in freqs:
        assert torch.all(group != 0)
        assert torch.all(group.abs() <= 1)


def test_directions_are_uniform_so_that_few_axes_are_nearly_unused():
    torch.manual_seed(0)
    freqs, _ = init_nd_freqs(2, 2, 4000, [[True, True]])
    cosines = freqs[0].flatten()
    # The odds that |cos u| < x are 2 asin(x) / pi
    for bound in (0.001, 0.1, 0.5):
        share = (cosines.abs() < bound).double().mean().item()
        odds = 2 * math.asin(bound) / math.pi
        assert abs(share - odds) < 5 * math.sqrt(odds * (1 - odds) / len(cosines))
    assert abs(cosines.mean().item()) < 5 * math.sqrt(0.5 / len(cosines))


def test_rotate_false_is_one_direction_and_draws_nothing():
    torch.manual_seed(0)
    freqs, _ = init_nd_freqs(2, 8, 3, [[True, True]], rotate=False)
    assert torch.equal(freqs[0][..., 0], torch.ones(2, 3))
    assert torch.rand(1).item() == pytest.approx(SEED_0_DRAWS[0], abs=1e-9)


def test_max_rotation_angle_bounds_the_directions():
    torch.manual_seed(0)
    freqs, _ = init_nd_freqs(1, 2, 3, [[True]], max_rotation_angle=0.5)
    wanted = torch.tensor([math.cos(0.5 * u) for u in SEED_0_DRAWS[:3]])
    torch.testing.assert_close(freqs[0].flatten(), wanted)


@pytest.mark.parametrize("position_dim", [1, 2, 3])
def test_head_dim_2_is_a_bare_cosine(position_dim):
    torch.manual_seed(0)
    freqs, ranges = init_nd_freqs(position_dim, 2, 2, [[True] * position_dim], thetas=1e4)
    wanted = torch.tensor([math.cos(2 * math.pi * u) for u in SEED_0_DRAWS[: 2 * position_dim]])
    torch.testing.assert_close(freqs[0].flatten(), wanted)
    assert ranges.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "thetas",
    [
        20,
        20.0,
        torch.tensor(20.0),
        torch.tensor([20.0]),
        torch.tensor([[[20.0]]]),
        [[20.0]],
        [[20.0], [20.0]],
        torch.full((1, 3), 20),
        torch.full((2, 3), 20.0, dtype=torch.float64),
    ],
    ids=lambda thetas: f"{type(thetas).__name__}{list(torch.as_tensor(thetas).shape)}",
)
def test_forms_of_thetas(thetas):
    freqs, _ = init_nd_freqs(3, 8, 1, SHARED_AXIS, thetas=thetas, rotate=False, dtype=torch.float32)
    for group in freqs:
        assert group.dtype == torch.float32
        torch.testing.assert_close(group, torch.tensor([1, 20**-0.5]).expand(2, 1, 2))


def test_thetas_belong_to_group_and_axis():
    thetas = [[4.0, 9.0, 16.0], [25.0, 36.0, 49.0]]
    freqs, _ = init_nd_freqs(3, 8, 1, SHARED_AXIS, thetas=thetas, rotate=False)
    torch.testing.assert_close(freqs[0][:, 0, 1], torch.tensor([1 / 2, 1 / 3]))
    torch.testing.assert_close(freqs[1][:, 0, 1], torch.tensor([1 / 6, 1 / 7]))


@pytest.mark.parametrize(
    "pattern",
    [
        SHARED_AXIS,
        torch.tensor(SHARED_AXIS),
        torch.tensor(SHARED_AXIS).float(),
        torch.tensor(SHARED_AXIS).long().numpy(),
    ],
    ids=["lists", "bool", "float", "numpy"],
)
def test_forms_of_pattern(pattern):
    freqs, _ = init_nd_freqs(3, 8, 2, pattern)
    assert [f.shape for f in freqs] == [(2, 2, 2), (2, 2, 2)]
    assert read_freq_group_pattern(pattern, 3).dtype == torch.bool
    assert read_freq_group_pattern(pattern, 3).tolist() == SHARED_AXIS


@pytest.mark.parametrize("make", [torch.tensor, list], ids=["tensor", "lists"])
def test_constructs_under_meta_device(make):
    pattern = make(SHARED_AXIS)
    with torch.device("meta"):
        freqs, ranges = init_nd_freqs(3, 8, 2, pattern)
        mixed = init_2d_freqs_rope_mixed(8, 2)
    assert {t.device.type for t in (*freqs, ranges, mixed)} == {"meta"}
    assert [f.shape for f in freqs] == [(2, 2, 2), (2, 2, 2)]


def test_device_argument_overrules_pattern_and_context():
    pattern = torch.tensor(SHARED_AXIS)
    freqs, ranges = init_nd_freqs(3, 8, 2, pattern, device="meta")
    assert {t.device.type for t in (*freqs, ranges)} == {"meta"}
    with torch.device("meta"):
        freqs, ranges = init_nd_freqs(3, 8, 2, pattern, device="cpu")
        mixed = init_2d_freqs_rope_mixed(8, 2, device="cpu")
    assert {t.device.type for t in (*freqs, ranges, mixed)} == {"cpu"}


def test_default_dtype_is_respected():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        freqs, _ = init_nd_freqs(1, 8, 1, [[True]])
        mixed = init_2d_freqs_rope_mixed(8, 1)
    finally:
        torch.set_default_dtype(before)
    assert freqs[0].dtype == mixed.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mixed_is_bitwise_one_tensor_operation_at_a_time(dtype):
    torch.manual_seed(0)
    freqs = init_2d_freqs_rope_mixed(24, 3, theta=7.0, dtype=dtype)
    assert freqs.shape == (2, 3, 12)
    assert freqs.dtype == dtype
    after = torch.rand(1)
    torch.manual_seed(0)
    growth = 7.0 ** (torch.arange(0, 24, 2, dtype=dtype) / 24)
    for axis in range(2):
        for head in range(3):
            cosine = torch.cos(torch.rand(1, dtype=dtype) * (2 * math.pi))
            assert torch.equal(freqs[axis, head], cosine * growth)
    assert torch.equal(torch.rand(1), after)


def test_mixed_golden_values():
    freqs = init_2d_freqs_rope_mixed(64, 2, rotate=False)
    # The RoPE-Mixed magnitudes theta ** (-4 j / D) are the reciprocals of every second one here
    magnitudes = torch.tensor([1, 0.86596, 0.74989, 0.11548])
    for axis in range(2):
        for head in range(2):
            torch.testing.assert_close(1 / freqs[axis, head, [0, 2, 4, 30]], magnitudes, rtol=0, atol=5e-6)
    torch.manual_seed(0)
    freqs = init_2d_freqs_rope_mixed(64, 3)
    cosines = [math.cos(2 * math.pi * u) for u in SEED_0_DRAWS]
    torch.testing.assert_close(freqs[..., 0].flatten(), torch.tensor(cosines))


def test_mixed_head_dim_2_is_a_bare_cosine():
    assert torch.equal(init_2d_freqs_rope_mixed(2, 3, theta=1e4, rotate=False), torch.ones(2, 3, 1))


@given(st.integers(0, 500), st.integers(1, 20))
def test_group_sizes_differ_by_at_most_one_larger_first(n_pairs, n_groups):
    sizes = group_sizes(n_pairs, n_groups, enforce_equal=False)
    assert len(sizes) == n_groups
    assert sum(sizes) == n_pairs
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    if n_pairs % n_groups == 0:
        assert group_sizes(n_pairs, n_groups) == sizes


VALID = {"position_dim": 2, "head_dim": 8, "num_heads": 2, "freq_group_pattern": [[True, True]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        (
            {"freq_group_pattern": [True, True]},
            "Expected 2D tensor for freq_group_pattern, got shape (2,)",
        ),
        (
            {"freq_group_pattern": [[True, True, True]]},
            "Expected second dimension of freq_group_pattern to have size equal to position_dim (2), "
            "got shape (1, 3)",
        ),
        (
            {"freq_group_pattern": torch.ones(0, 2)},
            "Expected freq_group_pattern to have at least one row, got shape (0, 2)",
        ),
        (
            {"freq_group_pattern": torch.ones(1, 2, device="meta")},
            "Expected freq_group_pattern to hold values",
        ),
        (
            {"freq_group_pattern": [[True, True]] * 3},
            "RoPE encodings (4) not evenly divisible by frequency groups (3)",
        ),
        (
            {"thetas": torch.tensor([10.0, 20.0])},
            "Expected thetas to either be a scalar or a 2D tensor, got shape (2,)",
        ),
        (
            {"thetas": torch.ones(1, 1, 2)},
            "Expected thetas to either be a scalar or a 2D tensor, got shape (1, 1, 2)",
        ),
        (
            {"thetas": torch.ones(1, 3)},
            "Expected thetas to be broadcastable to [n_freq_groups, position_dim] (1, 2), got shape (1, 3)",
        ),
        (
            {"thetas": torch.ones(2, 2)},
            "Expected thetas to be broadcastable to [n_freq_groups, position_dim] (1, 2), got shape (2, 2)",
        ),
        ({"dtype": torch.int64}, "Expected dtype to be a floating-point type, got torch.int64"),
        ({"dtype": torch.complex64}, "Expected dtype to be a floating-point type, got torch.complex64"),
    ],
)
def test_error_texts(changes, message):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        init_nd_freqs(**{**VALID, **changes})
    assert torch.equal(torch.get_rng_state(), state), "an error comes before any draw"


def test_error_texts_of_mixed():
    with pytest.raises(ValueError, match=r"^head_dim must be even for RoPE, got 65"):
        init_2d_freqs_rope_mixed(65, 8)
    with pytest.raises(ValueError, match=r"^Expected dtype to be a floating-point type, got torch.int32"):
        init_2d_freqs_rope_mixed(64, 8, dtype=torch.int32)


def test_error_text_of_group_sizes():
    message = "RoPE encodings (31) not evenly divisible by frequency groups (3)"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        group_sizes(31, 3)
