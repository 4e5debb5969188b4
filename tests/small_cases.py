"""Small calls of apply_rope and its relatives in float64, one of each kind, for their derivatives."""

import itertools

import pytest
import torch

# name: shapes of x, positions and freqs, and keyword arguments
CASES = {
    "interleaved": ((2, 3, 2, 4), (2, 3, 2), (2, 2, 2), {}),
    "shared positions": ((2, 3, 2, 4), (3, 2), (2, 2, 2), {}),
    "shared heads": ((2, 3, 2, 4), (3, 2), (2, 1, 2), {}),
    "half": ((3, 2, 6), (3, 2), (2, 2, 3), {"layout": "half"}),
    "blocks of four": ((3, 1, 8), (3, 2), (2, 1, 4), {"layout": 4}),
    "some channels": ((3, 2, 6), (3, 2), (2, 2, 2), {"rotary_offset": 1}),
    "some channels, half": ((3, 2, 7), (3, 1), (1, 1, 2), {"rotary_offset": 2, "layout": "half"}),
    "prefix": ((2, 4, 2, 4), (3, 2), (2, 2, 2), {"num_prefix_tokens": 1}),
    "prefix only": ((2, 2, 4), (0, 2), (2, 2, 2), {"num_prefix_tokens": 2}),
    "heads first": ((2, 2, 3, 4), (3, 2), (2, 2, 2), {"head_dim_first": True}),
    "heads first, prefix": (
        (2, 2, 4, 6),
        (2, 2, 2),
        (2, 1, 2),
        {"head_dim_first": True, "num_prefix_tokens": 2, "layout": "half"},
    ),
    "inverse": ((3, 2, 4), (3, 2), (2, 2, 2), {"inverse": True}),
    "x broadcast": ((1, 3, 2, 4), (2, 3, 2), (2, 2, 2), {}),
    "x with fewer dims": ((3, 1, 4), (2, 3, 1), (1, 1, 2), {}),
    "x broadcast, prefix": ((1, 3, 1, 4), (2, 2, 1), (1, 1, 2), {"num_prefix_tokens": 1}),
    "positions broadcast": ((2, 3, 2, 4), (2, 1, 2), (2, 2, 2), {}),
    "one position for all": ((2, 3, 1, 4), (2,), (2, 1, 2), {}),
    "a single token": ((2, 4), (2,), (2, 2, 2), {}),
    "one channel pair": ((3, 1, 2), (3, 1), (1, 1, 1), {}),
    "wider than a vector": ((2, 1, 38), (2, 1), (1, 1, 19), {}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SUBSETS = [needs for needs in itertools.product([True, False], repeat=3) if any(needs)]
SUBSET_NAMES = ["+".join(n for n, need in zip("xpf", s, strict=True) if need) for s in SUBSETS]
every_subset = pytest.mark.parametrize("needs", SUBSETS, ids=SUBSET_NAMES)
QKV_CASES = {
    "interleaved": ((3, 3, 2, 4), (3, 2), (2, 2, 2), {}),
    "batch": ((2, 3, 3, 2, 4), (2, 3, 2), (2, 1, 2), {}),
    "half, some channels": ((3, 3, 2, 6), (3, 2), (2, 2, 2), {"layout": "half", "rotary_offset": 1}),
    "prefix": ((4, 3, 1, 4), (3, 1), (1, 1, 2), {"num_prefix_tokens": 1}),
    "heads first": ((2, 3, 2, 3, 4), (3, 2), (2, 2, 2), {"head_dim_first": True}),
}
every_qkv_case = pytest.mark.parametrize("case", QKV_CASES.values(), ids=QKV_CASES.keys())


def double(*shape, requires_grad=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=requires_grad)


def inputs_of(case, needs=(True, True, True)):
    *shapes, options = case
    return tuple(
        double(*shape, requires_grad=need) for shape, need in zip(shapes, needs, strict=True)
    ), options


def in_place_of(function):
    """A function of leaves that rotates a copy in place."""
    return lambda x, *rest, **options: function(x.clone(), *rest, **options)
