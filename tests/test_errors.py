"""One row for each kind of bad input: the exception, how its text begins, and that nothing was written."""

import re

import pytest
import torch
from torch import Tensor

from nd_rotary_encodings import (
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qk,
    apply_rope_qkv_,
    calculate_rope,
    calculate_rope_backward,
    rotate_embeddings,
    rotate_embeddings_backward,
)


def t(*shape, dtype=torch.float32, device="cpu", layout=torch.strided):
    """Values that no rotation leaves alone."""
    values = torch.full(shape, 2.5, device=device).to(dtype)
    return values if layout == torch.strided else values.to_sparse(layout=layout)


def assert_refused(call, arguments, options, error, text):
    tensors = [a for a in (*arguments, *options.values()) if isinstance(a, Tensor)]
    tensors = [a for a in tensors if not a.is_meta and a.layout == torch.strided]
    before = [(a.detach().clone(), a._version) for a in tensors]
    with pytest.raises(error, match="^" + re.escape(text)):
        call(*arguments, **options)
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor._version == version


# ---- the constructor

CONSTRUCTION = {
    "embed_dim not divisible": (
        (2, 33, 2),
        {},
        "Expected embed_dim to be divisible by n_heads, got 33 and 2",
    ),
    "no heads": ((2, 32, 0), {}, "Expected embed_dim to be divisible by n_heads, got 32 and 0"),
    "negative heads": ((2, 32, -2), {}, "Expected embed_dim to be divisible by n_heads"),
    "odd head_dim": ((2, 10, 2), {}, "Expected head_dim to be divisible by 2, got 5"),
    "no channels": ((2, 0, 2), {}, "Expected head_dim to be divisible by 2, got 0"),
    "no axes": ((0, 32, 2), {}, "Expected position_dim to be at least 1, got 0"),
    "inplace alone": ((2, 32, 2), {"inplace": True}, "`inplace=True` requires `forward_only=True`"),
    "checkpointing and forward_only": (
        (2, 32, 2),
        {"use_checkpointing": True, "forward_only": True},
        "`use_checkpointing` is incompatible with `forward_only`",
    ),
    "1-D pattern": (
        (2, 32, 2),
        {"freq_group_pattern": [True, True]},
        "Expected 2D tensor for freq_group_pattern, got shape (2,)",
    ),
    "3-D pattern": (
        (2, 32, 2),
        {"freq_group_pattern": torch.ones(1, 1, 2)},
        "Expected 2D tensor for freq_group_pattern, got shape (1, 1, 2)",
    ),
    "pattern of other axes": (
        (2, 32, 2),
        {"freq_group_pattern": [[True, True, True]]},
        "Expected second dimension of freq_group_pattern to have size equal to position_dim",
    ),
    "pattern without rows": (
        (2, 32, 2),
        {"freq_group_pattern": torch.ones(0, 2)},
        "Expected freq_group_pattern to have at least one row",
    ),
    "pattern without values": (
        (2, 32, 2),
        {"freq_group_pattern": torch.ones(1, 2, device="meta")},
        "Expected freq_group_pattern to hold values",
    ),
    "unequal groups": (
        (2, 32, 2),
        {"freq_group_pattern": [[1, 1], [1, 0], [0, 1]]},
        "RoPE encodings (8) not evenly divisible by frequency groups (3)",
    ),
    "1-D thetas": (
        (2, 32, 2),
        {"rope_base_theta": [10.0, 20.0]},
        "Expected thetas to either be a scalar or a 2D tensor, got shape (2,)",
    ),
    "thetas of other groups": (
        (2, 32, 2),
        {"rope_base_theta": [[10.0, 20.0], [10.0, 20.0]]},
        "Expected thetas to be broadcastable to",
    ),
    "thetas of other axes": (
        (2, 32, 2),
        {"rope_base_theta": [[10.0, 20.0, 30.0]]},
        "Expected thetas to be broadcastable to",
    ),
    "integer dtype": (
        (2, 32, 2),
        {"dtype": torch.int32},
        "Expected dtype to be a floating-point type, got torch.int32",
    ),
}


@pytest.mark.parametrize(("arguments", "options", "text"), CONSTRUCTION.values(), ids=CONSTRUCTION.keys())
def test_module_refuses_to_be_made(arguments, options, text):
    assert_refused(RoPEEncodingND, arguments, options, ValueError, text)


# ---- the module's forward

MODES = {
    "training": {},
    "checkpointing": {"use_checkpointing": True},
    "forward_only": {"forward_only": True},
    "in place": {"forward_only": True, "inplace": True},
}
LEADING = (
    "Expected leading dims of query_or_key_pos to be broadcastable to leading dims of query_or_key, "
    "but got shapes "
)
CHANNELS = "Expected query_or_key to have last dim equal to embed_dim (=16), got shape "
AXES = "Expected query_or_key_pos to have last dim equal to pos_dim (=2), got shape "
FORWARD = {
    "other number of tokens": (t(3, 5, 16), t(4, 2), LEADING + "(4, 2) and (3, 5, 16), respectively"),
    "other batch": (t(3, 5, 16), t(2, 5, 2), LEADING + "(2, 5, 2) and (3, 5, 16), respectively"),
    "axes before tokens": (t(3, 5, 16), t(2, 5), LEADING + "(2, 5) and (3, 5, 16), respectively"),
    "channels before tokens": (t(3, 16, 5), t(5, 2), LEADING + "(5, 2) and (3, 16, 5), respectively"),
    "other number of channels": (t(3, 5, 18), t(5, 2), CHANNELS + "(3, 5, 18)"),
    "heads apart": (t(5, 2, 8), t(5, 2, 2), CHANNELS + "(5, 2, 8)"),
    "no channels": (t(3, 5, 0), t(5, 2), CHANNELS + "(3, 5, 0)"),
    "one value for all": (t(), t(2), CHANNELS + "()"),
    "other number of axes": (t(3, 5, 16), t(5, 3), AXES + "(5, 3)"),
    "no axes": (t(3, 5, 16), t(5, 0), AXES + "(5, 0)"),
    "position without dims": (t(3, 5, 16), t(), AXES + "()"),
}
TYPES = {
    "integers": (
        {"dtype": torch.int32},
        {},
        "Expected {0} to be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    "bools": (
        {"dtype": torch.bool},
        {},
        "Expected {0} to be float16, bfloat16, float32 or float64, got torch.bool",
    ),
    "complex": ({"dtype": torch.complex64}, {}, "Expected {0} to be float16, bfloat16, float32 or float64"),
    "float8": (
        {"dtype": torch.float8_e4m3fn},
        {},
        "Expected {0} to be float16, bfloat16, float32 or float64",
    ),
    "bool positions": (
        {},
        {"dtype": torch.bool},
        "Expected {0}_pos to be integers or real floating point, got torch.bool",
    ),
    "complex positions": (
        {},
        {"dtype": torch.complex64},
        "Expected {0}_pos to be integers or real floating point",
    ),
    "float8 positions": (
        {},
        {"dtype": torch.float8_e4m3fn},
        "Expected {0}_pos to be integers or real floating point",
    ),
    "sparse": (
        {"layout": torch.sparse_coo},
        {},
        "Expected {0}, {0}_pos and freqs to be strided, got torch.sparse_coo, torch.strided and",
    ),
    "sparse positions": (
        {},
        {"layout": torch.sparse_coo},
        "Expected {0}, {0}_pos and freqs to be strided, got torch.strided, torch.sparse_coo and",
    ),
    "on another device": (
        {"device": "meta"},
        {},
        "Expected {0}, {0}_pos and freqs to be on one device, got meta, cpu and cpu",
    ),
    "positions on another device": (
        {},
        {"device": "meta"},
        "Expected {0}, {0}_pos and freqs to be on one device, got cpu, meta and cpu",
    ),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@every_mode
@pytest.mark.parametrize(("query", "positions", "text"), FORWARD.values(), ids=FORWARD.keys())
def test_module_refuses_a_query(query, positions, text, mode):
    assert_refused(RoPEEncodingND(2, 16, 2, **mode), (query, positions), {}, ValueError, text)


@every_mode
@pytest.mark.parametrize(("key", "positions", "text"), FORWARD.values(), ids=FORWARD.keys())
def test_module_refuses_a_key_and_leaves_the_query_alone(key, positions, text, mode):
    arguments = (t(3, 5, 16), t(5, 2), key, positions)
    assert_refused(RoPEEncodingND(2, 16, 2, **mode), arguments, {}, ValueError, text)


@every_mode
@pytest.mark.parametrize(("x", "positions", "text"), TYPES.values(), ids=TYPES.keys())
def test_module_refuses_types_and_devices_of_a_query(x, positions, text, mode):
    arguments = (t(3, 5, 16, **x), t(5, 2, **positions))
    assert_refused(RoPEEncodingND(2, 16, 2, **mode), arguments, {}, ValueError, text.format("query"))


@every_mode
@pytest.mark.parametrize(("x", "positions", "text"), TYPES.values(), ids=TYPES.keys())
def test_module_refuses_types_and_devices_of_a_key(x, positions, text, mode):
    arguments = (t(3, 5, 16), t(5, 2), t(3, 5, 16, **x), t(5, 2, **positions))
    assert_refused(RoPEEncodingND(2, 16, 2, **mode), arguments, {}, ValueError, text.format("key"))


@every_mode
def test_module_on_another_device_refuses(mode):
    text = "Expected query, query_pos and freqs to be on one device, got cpu, cpu and meta"
    assert_refused(RoPEEncodingND(2, 16, 2, **mode).to("meta"), (t(3, 5, 16), t(5, 2)), {}, ValueError, text)


@every_mode
def test_module_refuses_positions_of_no_key(mode):
    arguments = {"query": t(5, 16), "query_pos": t(5, 2), "key_pos": t(5, 2)}
    text = "Expected key to be given where key_pos is"
    assert_refused(RoPEEncodingND(2, 16, 2, **mode), (), arguments, ValueError, text)


def test_module_checks_key_against_the_positions_of_the_query():
    module = RoPEEncodingND(2, 16, 2)
    text = LEADING + "(5, 2) and (7, 16), respectively"
    assert_refused(module, (t(5, 16), t(5, 2), t(7, 16)), {}, ValueError, text)


@pytest.mark.parametrize(("query", "positions", "text"), FORWARD.values(), ids=FORWARD.keys())
def test_shape_check_says_what_the_forward_says(query, positions, text):
    assert_refused(RoPEEncodingND(2, 16, 2).shape_check, (query, positions), {}, ValueError, text)


def test_end_to_end_refuses_frequencies_of_three_dims():
    module = RoPEEncodingND(2, 16, 2)
    text = "Expected 4 dimensions for rope_freqs, got shape (2, 2, 4)"
    assert_refused(module.apply_rope_endtoend, (t(5, 2, 8), t(5, 2), t(2, 2, 4)), {}, ValueError, text)


# ---- apply_rope and its relatives

X, P, F = t(4, 5, 2, 8), t(5, 2), t(2, 2, 4)
SHAPE = "Expected x to have shape [..., N, H, D] of at most 16 dims, got "
RANGE = "Expected the rotated channels [rotary_offset, rotary_offset + 2 * F) = "
NUMBER = "Expected layout as a number to be even and to divide the rotated channels (8), got "
NAME = "Expected layout to be 'interleaved', 'half' or a number of channels, got "
PREFIX = "Expected num_prefix_tokens to be between 0 and the number of tokens (5), got "
AXES_MATCH = (
    "Expected first dimension of freqs and last dimension of positions to match and not to be 0, got shapes "
)
BROADCAST = "Expected leading dims of positions to be broadcastable to leading dims of x, but got shapes "
ROTATION = {
    "integers": (
        (X.int(), P, F),
        {},
        "Expected x to be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    "bools": ((X.bool(), P, F), {}, "Expected x to be float16, bfloat16, float32 or float64, got torch.bool"),
    "complex": ((X.cfloat(), P, F), {}, "Expected x to be float16, bfloat16, float32 or float64"),
    "bool positions": (
        (X, P.bool(), F),
        {},
        "Expected positions to be integers or real floating point, got torch.bool",
    ),
    "complex positions": ((X, P.cfloat(), F), {}, "Expected positions to be integers or real floating point"),
    "integer freqs": (
        (X, P, F.int()),
        {},
        "Expected freqs to be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    "complex freqs": ((X, P, F.cfloat()), {}, "Expected freqs to be float16, bfloat16, float32 or float64"),
    "sparse x": (
        (X.to_sparse(), P, F),
        {},
        "Expected x, positions and freqs to be strided, got torch.sparse_coo, torch.strided and",
    ),
    "sparse positions": (
        (X, P.to_sparse(), F),
        {},
        "Expected x, positions and freqs to be strided, got torch.strided, torch.sparse_coo and",
    ),
    "sparse freqs": (
        (X, P, F.to_sparse()),
        {},
        "Expected x, positions and freqs to be strided, got torch.strided, torch.strided and",
    ),
    "x elsewhere": (
        (X.to("meta"), P, F),
        {},
        "Expected x, positions and freqs to be on one device, got meta, cpu and cpu",
    ),
    "positions elsewhere": (
        (X, P.to("meta"), F),
        {},
        "Expected x, positions and freqs to be on one device, got cpu, meta",
    ),
    "freqs elsewhere": (
        (X, P, F.to("meta")),
        {},
        "Expected x, positions and freqs to be on one device, got cpu, cpu",
    ),
    "one dim": ((t(8), t(2), F), {}, SHAPE + "(8,)"),
    "17 dims": ((t(*(1,) * 15, 2, 8), P, F), {}, SHAPE),
    "prefix without tokens": ((t(2, 8), t(2), F), {"num_prefix_tokens": 1}, SHAPE + "(2, 8)"),
    "heads first without tokens": (
        (t(2, 8), t(2), F),
        {"head_dim_first": True},
        "Expected x to have shape [..., H, N, D] of at most 16 dims, got (2, 8)",
    ),
    "positions without dims": (
        (X, t(), F),
        {},
        "Expected positions to have shape [..., N, P] of fewer than 16 dims, got ()",
    ),
    "positions of 16 dims": ((X, t(*(1,) * 15, 2), F), {}, "Expected positions to have shape [..., N, P]"),
    "freqs of two dims": ((X, P, F[0]), {}, "Expected freqs to have shape [P, H or 1, F], got (2, 4)"),
    "freqs of four dims": (
        (X, P, F[:, None]),
        {},
        "Expected freqs to have shape [P, H or 1, F], got (2, 1, 2, 4)",
    ),
    "other number of axes": ((X, t(5, 3), F), {}, AXES_MATCH + "(2, 2, 4) and (5, 3)"),
    "axes before tokens": ((X, t(2, 5), F), {}, AXES_MATCH + "(2, 2, 4) and (2, 5)"),
    "no axes": ((X, t(5, 0), F[:0]), {}, AXES_MATCH + "(0, 2, 4) and (5, 0)"),
    "other number of heads": (
        (X, P, t(2, 3, 4)),
        {},
        "Expected freqs to have as many heads as x (2) or 1, got 3",
    ),
    "heads first, as tokens": (
        (X, P, F),
        {"head_dim_first": True},
        "Expected freqs to have as many heads as x (5) or 1, got 2",
    ),
    "too many pairs": ((X, P, t(2, 2, 5)), {}, RANGE + "[0, 10) to lie inside a head of 8 channels"),
    "odd head_dim": ((t(4, 5, 2, 7), P, F), {}, RANGE + "[0, 8) to lie inside a head of 7 channels"),
    "offset too large": (
        (X, P, F),
        {"rotary_offset": 1},
        RANGE + "[1, 9) to lie inside a head of 8 channels",
    ),
    "offset negative": ((X, P, t(2, 2, 3)), {"rotary_offset": -1}, RANGE + "[-1, 5)"),
    "layout of another name": ((X, P, F), {"layout": "neox"}, NAME + "'neox'"),
    "layout None": ((X, P, F), {"layout": None}, NAME + "None"),
    "layout True": ((X, P, F), {"layout": True}, NAME + "True"),
    "layout 2.0": ((X, P, F), {"layout": 2.0}, NAME + "2.0"),
    "layout 0": ((X, P, F), {"layout": 0}, NUMBER + "0"),
    "layout odd": ((X, P, F), {"layout": 1}, NUMBER + "1"),
    "layout odd, though it divides": (
        (t(5, 2, 12), P, t(2, 2, 6)),
        {"layout": 3},
        "Expected layout as a number to be even and to divide the rotated channels (12), got 3",
    ),
    "layout negative": ((X, P, F), {"layout": -4}, NUMBER + "-4"),
    "layout that does not divide": ((X, P, F), {"layout": 6}, NUMBER + "6"),
    "layout too large": ((X, P, F), {"layout": 16}, NUMBER + "16"),
    "prefix negative": ((X, P, F), {"num_prefix_tokens": -1}, PREFIX + "-1"),
    "prefix too long": ((X, P, F), {"num_prefix_tokens": 6}, PREFIX + "6"),
    "prefix and all positions": (
        (X, P, F),
        {"num_prefix_tokens": 1},
        BROADCAST + "(5, 2) and (4, 5, 2, 8)",
    ),
    "other number of tokens": (
        (X, t(4, 2), F),
        {},
        BROADCAST + "(4, 2) and (4, 5, 2, 8)",
    ),
    "other batch": (
        (X, t(3, 5, 2), F),
        {},
        BROADCAST + "(3, 5, 2) and",
    ),
}


@pytest.mark.parametrize("function", [apply_rope, apply_rope_])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("arguments", "options", "text"), ROTATION.values(), ids=ROTATION.keys())
def test_rotation_refuses(arguments, options, text, grad, function):
    arguments = [a.clone() for a in arguments]
    if grad and arguments[1].is_floating_point():
        arguments[1].requires_grad_()
    assert_refused(function, arguments, options, ValueError, text)


@pytest.mark.parametrize(("arguments", "options", "text"), ROTATION.values(), ids=ROTATION.keys())
def test_rotation_of_queries_and_keys_refuses(arguments, options, text):
    x, *others = arguments
    text = re.sub(r"\bx\b", "query", text)
    assert_refused(apply_rope_qk, (x, x, *others), options, ValueError, text)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("name", ["integers", "sparse x", "x elsewhere"])
def test_rotation_of_queries_and_keys_names_the_key(name, layout):
    (key, *_), _, text = ROTATION[name]
    text = re.sub(r"\bx\b", "key", text)
    assert_refused(apply_rope_qk, (X, key, P, F), {"layout": layout}, ValueError, text)
    text = "Expected freqs to have as many heads as key (3)"
    assert_refused(apply_rope_qk, (X, t(4, 5, 3, 8), P, F), {"layout": layout}, ValueError, text)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotation_refuses_a_result_of_17_dims(layout):
    text = "Expected positions to have shape [..., N, P] of fewer than 16 dims, got (1, "
    assert_refused(apply_rope, (t(2, 8), t(*(1,) * 15, 2), F), {"layout": layout}, ValueError, text)
    # each alone is allowed
    assert apply_rope(t(*(1,) * 14, 2, 8), t(*(1,) * 14, 2), F, layout=layout).ndim == 16


def sliding_windows():
    return torch.arange(40.0).unfold(0, 16, 8).unflatten(-1, (2, 8))


MEMORY = "In place, expected each element of x to have memory of its own"
IN_PLACE = {
    "larger positions": ((t(1, 5, 2, 8), t(4, 5, 2), F), {}, "In place, x needs the full shape"),
    "positions of more dims": ((X, t(1, 4, 5, 2), F), {}, "In place, x needs the full shape"),
    "larger positions, prefix": (
        (t(1, 5, 2, 8), t(4, 4, 2), F),
        {"num_prefix_tokens": 1},
        "In place, x needs the full shape",
    ),
    "larger positions, heads first": (
        (t(1, 2, 5, 8), t(4, 5, 2), F),
        {"head_dim_first": True},
        "In place, x needs the full shape",
    ),
    "expanded": (
        (t(5, 2, 8).expand(4, 5, 2, 8), P, F),
        {},
        MEMORY + ", got strides (0, 16, 8, 1) for shape (4, 5, 2, 8)",
    ),
    "expanded heads": (
        (t(5, 1, 8).expand(5, 2, 8), P, F),
        {},
        MEMORY,
    ),
    "overlapping": (
        (sliding_windows(), t(4, 2), F),
        {},
        MEMORY,
    ),
}


@pytest.mark.parametrize(("arguments", "options", "text"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_rotation_in_place_refuses(arguments, options, text):
    assert_refused(apply_rope_, arguments, options, ValueError, text)
    apply_rope(*arguments, **options)


QKV = t(4, 5, 3, 2, 8)
PACKED = "Expected qkv to have shape [..., N, 3, H, D], got "
PROJECTION = {
    "three dims": ((t(3, 2, 8), t(2), F), {}, PACKED + "(3, 2, 8)"),
    "not three parts": ((t(4, 5, 2, 2, 8), P, F), {}, PACKED + "(4, 5, 2, 2, 8)"),
    "parts before tokens": ((t(4, 3, 5, 2, 8), P, F), {}, PACKED + "(4, 3, 5, 2, 8)"),
    "tokens before parts": (
        (QKV, P, F),
        {"head_dim_first": True},
        "Expected qkv to have shape [..., 3, H, N, D], got (4, 5, 3, 2, 8)",
    ),
    "integers": ((QKV.int(), P, F), {}, "Expected x to be float16"),
    "other number of tokens": (
        (QKV, t(4, 2), F),
        {},
        "Expected leading dims of positions to be broadcastable",
    ),
    "other number of axes": ((QKV, t(5, 3), F), {}, AXES_MATCH),
    "larger positions": ((t(1, 5, 3, 2, 8), t(4, 5, 2), F), {}, "In place, x needs the full shape"),
    "expanded": ((t(5, 3, 2, 8).expand(4, 5, 3, 2, 8), P, F), {}, "In place, expected each element of x"),
    "layout": ((QKV, P, F), {"layout": "other"}, NAME),
    "sparse positions": (
        (QKV, P.to_sparse(), F),
        {},
        "Expected x, positions and freqs to be strided, got torch.str",
    ),
    "positions elsewhere": (
        (QKV, P.to("meta"), F),
        {},
        "Expected x, positions and freqs to be on one device",
    ),
}


@pytest.mark.parametrize(("arguments", "options", "text"), PROJECTION.values(), ids=PROJECTION.keys())
def test_packed_projection_refuses(arguments, options, text):
    assert_refused(apply_rope_qkv_, arguments, options, ValueError, text)


# ---- functions of given angles

E, A, FREQS, G = t(4, 5, 2, 8), t(4, 5, 2, 4), t(2, 1, 2, 4), t(5, 2, 4)
AXES_OF_FREQS = "Expected first dimension of `rope_freqs` and last dimension of positions to match, got "
HALF = "Expected rope_encoding to have last dimension equal to 1/2 embedding's head dim, got "
SAME = "Expected embeddings and rope_encoding to have the same number of dims, got shapes "
CALCULATION = {
    "positions of one dim": ((t(2), FREQS), ValueError, "Expected at least 2 dimensions for positions"),
    "freqs of three dims": ((P, F), ValueError, "Expected 4 dimensions for rope_freqs"),
    "freqs of five dims": ((P, FREQS[None]), ValueError, "Expected 4 dimensions for rope_freqs"),
    "other number of axes": ((t(5, 3), FREQS), ValueError, AXES_OF_FREQS + "2 and 3"),
    "no axes": (
        (P[:, :0], FREQS[:0]),
        ValueError,
        "Expected at least 1 position axis, got rope_freqs of shape",
    ),
    "complex positions": ((P.cfloat(), FREQS), ValueError, "Expected positions to be real"),
    "complex freqs": ((P, FREQS.cfloat()), ValueError, "Expected rope_freqs to be real"),
    "bool positions": ((P.bool(), FREQS), ValueError, "Expected positions to be "),
    "integer freqs": ((P, FREQS.int()), ValueError, "Expected rope_freqs to be "),
    "sparse positions": (
        (P.to_sparse(), FREQS),
        ValueError,
        "Expected positions to be strided, got torch.sparse_coo",
    ),
    "sparse freqs": (
        (P, FREQS.to_sparse()),
        ValueError,
        "Expected rope_freqs to be strided, got torch.sparse_coo",
    ),
    "positions elsewhere": (
        (P.to("meta"), FREQS),
        ValueError,
        "Expected positions and rope_freqs to be on one device",
    ),
    "freqs elsewhere": (
        (P, FREQS.to("meta")),
        ValueError,
        "Expected positions and rope_freqs to be on one device",
    ),
}
BY_ANGLES = {
    "angles of fewer dims": ((E, A[0]), ValueError, SAME),
    "embeddings of fewer dims": ((E[0], A), ValueError, SAME),
    "two dims": ((t(2, 8), t(2, 4)), ValueError, "Expected at least 3 dimensions for embeddings"),
    "odd head_dim": ((t(4, 5, 2, 9), A), ValueError, HALF + "4 and 9"),
    "other number of pairs": ((E, t(4, 5, 2, 3)), ValueError, HALF + "3 and 8"),
    "complex embeddings": ((E.cfloat(), A), ValueError, "Expected embeddings to be real"),
    "complex angles": ((E, A.cfloat()), ValueError, "Expected rope_encoding to be real"),
    "integer embeddings": (
        (E.int(), A),
        ValueError,
        "Expected embeddings and rope_encoding to be floating point, got torch.int32",
    ),
    "bool embeddings": (
        (E.bool(), A),
        ValueError,
        "Expected embeddings and rope_encoding to be floating point",
    ),
    "integer angles": (
        (E, A.int()),
        ValueError,
        "Expected embeddings and rope_encoding to be floating point",
    ),
    "angles elsewhere": (
        (E, A.to("meta")),
        ValueError,
        "Expected embeddings and rope_encoding to be on one device",
    ),
    "embeddings elsewhere": (
        (E.to("meta"), A),
        ValueError,
        "Expected embeddings and rope_encoding to be on one device",
    ),
    "other batch": (
        (E, t(3, 5, 2, 4)),
        RuntimeError,
        "The size of tensor a (4) must match the size of tensor b (3)",
    ),
    "other tokens": (
        (E, t(4, 6, 2, 4)),
        RuntimeError,
        "The size of tensor a (5) must match the size of tensor b (6)",
    ),
    "other heads": (
        (E, t(4, 5, 3, 4)),
        RuntimeError,
        "The size of tensor a (2) must match the size of tensor b (3)",
    ),
    "one head, angles of two": (
        (t(5, 1, 8), t(5, 2, 4)),
        RuntimeError,
        "The size of tensor a (1) must match the size of",
    ),
    "float8 embeddings": ((E.to(torch.float8_e4m3fn), A), ValueError, "Expected embeddings"),
    "float8 angles": ((E, A.to(torch.float8_e4m3fn)), ValueError, "Expected "),
    "sparse embeddings": (
        (E.to_sparse(), A),
        ValueError,
        "Expected embeddings to be strided, got torch.sparse_coo",
    ),
    "sparse angles": (
        (E, A.to_sparse()),
        ValueError,
        "Expected rope_encoding to be strided, got torch.sparse_coo",
    ),
    "17 dims": (
        (t(*(1,) * 15, 2, 8), t(*(1,) * 15, 2, 4)),
        RuntimeError,
        "tensors may have at most 16 dimensions",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "text"), CALCULATION.values(), ids=CALCULATION.keys())
def test_calculate_rope_refuses(arguments, error, text):
    assert_refused(calculate_rope, arguments, {}, error, text)
    assert_refused(RoPEEncodingND.calculate_rope, arguments, {}, error, text)


@pytest.mark.parametrize(("arguments", "error", "text"), CALCULATION.values(), ids=CALCULATION.keys())
def test_calculate_rope_backward_refuses(arguments, error, text):
    assert_refused(calculate_rope_backward, (G, *arguments, True, True), {}, error, text)


def test_calculate_rope_refuses_positions_of_16_dims():
    text = "positions need 2 to 15 dims"
    assert_refused(calculate_rope, (t(*(1,) * 15, 2), FREQS), {}, RuntimeError, text)


GRADIENTS_OF_ANGLES = {
    "two dims": (t(2, 4), "Expected at least 3 dimensions for grad_rope_encoding"),
    "other heads": (t(5, 3, 4), "Expected grad_rope_encoding to have the heads and pairs of rope_freqs"),
    "one head": (t(5, 1, 4), "Expected grad_rope_encoding to have the heads and pairs of rope_freqs"),
    "one pair": (t(5, 2, 1), "Expected grad_rope_encoding to have the heads and pairs of rope_freqs"),
    "integers": (G.int(), "Expected grad_rope_encoding to be float16, bfloat16, float32 or float64"),
    "complex": (G.cfloat(), "Expected grad_rope_encoding to be real"),
    "sparse": (G.to_sparse(), "Expected grad_rope_encoding to be strided, got torch.sparse_coo"),
    "elsewhere": (G.to("meta"), "Expected grad_rope_encoding and positions to be on one device"),
}


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(("gradient", "text"), GRADIENTS_OF_ANGLES.values(), ids=GRADIENTS_OF_ANGLES.keys())
def test_calculate_rope_backward_refuses_a_gradient(gradient, text, needs):
    assert_refused(calculate_rope_backward, (gradient, P, FREQS, *needs), {}, ValueError, text)


@pytest.mark.parametrize("needs_autograd", [True, False], ids=["out of place", "in place"])
@pytest.mark.parametrize(("arguments", "error", "text"), BY_ANGLES.values(), ids=BY_ANGLES.keys())
def test_rotate_embeddings_refuses(arguments, error, text, needs_autograd):
    assert_refused(rotate_embeddings, arguments, {"needs_autograd": needs_autograd}, error, text)


@pytest.mark.parametrize("needs_autograd", [True, False])
@pytest.mark.parametrize(("arguments", "error", "text"), BY_ANGLES.values(), ids=BY_ANGLES.keys())
def test_rotate_embeddings_backward_refuses(arguments, error, text, needs_autograd):
    arguments = (t(*arguments[0].shape), *arguments)
    assert_refused(rotate_embeddings_backward, arguments, {"needs_autograd": needs_autograd}, error, text)


GRADIENTS = {
    "another shape": (
        (t(1, 5, 2, 8), E, A),
        "Expected grad_embeddings_rotated and embeddings to have the same shape",
    ),
    "fewer dims": (
        (t(5, 2, 8), E, A),
        "Expected grad_embeddings_rotated and embeddings to have the same shape",
    ),
    "complex": ((E.cfloat(), E, A), "Expected grad_embeddings_rotated to be real"),
    "integers": (
        (E.int(), E, A),
        "Expected grad_embeddings_rotated to be float16, bfloat16, float32 or float64",
    ),
    "sparse": ((E.to_sparse(), E, A), "Expected grad_embeddings_rotated to be strided, got torch.sparse_coo"),
    "elsewhere": ((E.to("meta"), E, A), "Expected grad_embeddings_rotated"),
}


@pytest.mark.parametrize("needs_autograd", [True, False])
@pytest.mark.parametrize(("arguments", "text"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_rotate_embeddings_backward_refuses_a_gradient(arguments, text, needs_autograd):
    assert_refused(
        rotate_embeddings_backward, arguments, {"needs_autograd": needs_autograd}, ValueError, text
    )


IN_PLACE_BY_ANGLES = {
    "larger angles": (t(1, 5, 2, 8), A),
    "expanded": (t(5, 2, 8).expand(4, 5, 2, 8), A),
}


@pytest.mark.parametrize("arguments", IN_PLACE_BY_ANGLES.values(), ids=IN_PLACE_BY_ANGLES.keys())
def test_rotate_embeddings_in_place_refuses_what_it_cannot_write(arguments):
    assert_refused(rotate_embeddings, arguments, {"needs_autograd": False}, (ValueError, RuntimeError), "")
