"""Calls of ``apply_rope`` as Hypothesis draws them, tensors in memory in every way, and exact results.

The exact results share nothing with the package: angles and their cos and sin come from mpmath, and which
channels make a pair is written out here once more.
"""

import math
from dataclasses import dataclass

import mpmath
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

EMBEDDING_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
POSITION_DTYPES = EMBEDDING_DTYPES + INTEGER_DTYPES

# around the vector widths 2, 4, 8 and 16, and two real head sizes
HALF_DIMS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 160)


def name(dtype: torch.dtype) -> str:
    """For ids of parametrized tests."""
    return str(dtype).removeprefix("torch.")


# ---- memory layouts


def poison(shape, dtype: torch.dtype) -> Tensor:
    """What no kernel may read: NaN, or the largest integer."""
    value = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(tuple(shape), value, dtype=dtype)


def _part_of(values: Tensor, buffer_shape, select) -> Tensor:
    part = select(poison(buffer_shape, values.dtype))
    return part.copy_(values)


def _transposed(values: Tensor) -> Tensor:
    a, b = (-3, -2) if values.ndim >= 3 else (-2, -1)
    return values.transpose(a, b).contiguous().transpose(a, b)


def _qkv_slice(values: Tensor) -> Tensor:
    return _part_of(values, (*values.shape[:-2], 3, *values.shape[-2:]), lambda buffer: buffer.select(-3, 1))


def _columns(values: Tensor) -> Tensor:
    size = values.shape[-1]
    return _part_of(values, (*values.shape[:-1], size + 4), lambda buffer: buffer.narrow(-1, 1, size))


def _step_2(values: Tensor) -> Tensor:
    return _part_of(values, (2 * values.shape[0], *values.shape[1:]), lambda buffer: buffer[::2])


def _channel_step_2(values: Tensor) -> Tensor:
    return _part_of(values, (*values.shape[:-1], 2 * values.shape[-1]), lambda buffer: buffer[..., ::2])


def _reversed_dims(values: Tensor) -> Tensor:
    dims = tuple(reversed(range(values.ndim)))
    return values.permute(dims).contiguous().permute(dims)


def _odd_offset(values: Tensor) -> Tensor:
    return _part_of(values, (values.numel() + 1,), lambda buffer: buffer[1:].view(values.shape))


MEMORY_KINDS = {
    "contiguous": lambda values: values.clone(memory_format=torch.contiguous_format),
    "transposed": _transposed,
    "qkv_slice": _qkv_slice,
    "columns": _columns,
    "step_2": _step_2,
    "channel_step_2": _channel_step_2,
    "reversed_dims": _reversed_dims,
    "expanded": lambda values: values[:1].expand(values.shape),
    "flipped": lambda values: torch.cat(values.split(1)[::-1]),  # flip knows no uint16
    "odd_offset": _odd_offset,
}


def in_memory(values: Tensor, kind: str) -> Tensor:
    """``values`` (of two dims or more) in memory of that kind, among poison.

    "expanded" repeats the first entry of dim 0, and "flipped" turns dim 0 round; all others keep the values.
    """
    return MEMORY_KINDS[kind](values)


# ---- calls


@dataclass(frozen=True)
class Call:
    x: Tensor
    positions: Tensor
    freqs: Tensor
    settings: dict
    x_memory: str = "contiguous"
    positions_memory: str = "contiguous"
    freqs_memory: str = "contiguous"

    def __call__(self, function, **changes):
        return function(self.x, self.positions, self.freqs, **{**self.settings, **changes})

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of ``x``, without prefix tokens."""
        head_dim_first, prefix = self.settings["head_dim_first"], self.settings["num_prefix_tokens"]
        lead = [*self.x.shape[:-3], self.x.shape[-2]] if head_dim_first else [*self.x.shape[:-2]]
        if prefix:
            lead[-1] -= prefix
        return tuple(lead)

    @property
    def full_shape(self) -> bool:
        """Whether the result has the shape of ``x``, as in place it must."""
        lead, position_lead = self.lead, tuple(self.positions.shape[:-1])
        if len(position_lead) > len(lead):
            return False
        return torch.broadcast_shapes(lead, position_lead) == lead


def random_embeddings(shape, dtype: torch.dtype, seed: int, special: bool = False) -> Tensor:
    """Normal values; with ``special`` a third of them are zeros of both signs, subnormal, tiny or huge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    if special:
        limits = torch.finfo(dtype)
        tiny = limits.smallest_normal
        values = torch.tensor([0.0, -0.0, tiny * limits.eps, -tiny, limits.max / 4, 1.0], dtype=torch.float64)
        index = torch.randint(3 * len(values), tuple(shape), generator=generator)
        x = torch.where(index < len(values), values.to(dtype)[index % len(values)], x)
    return x


def random_positions(shape, dtype: torch.dtype, extent: float, seed: int) -> Tensor:
    """In [-extent, extent], as far as the dtype goes, a fifth of them 0."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * 2 - 1) * extent
    values[torch.rand(tuple(shape), generator=generator) < 0.2] = 0
    if dtype.is_floating_point:
        return values.to(dtype)
    limits = torch.iinfo(dtype)
    return values.round().clamp(max(limits.min, -(2**53)), min(limits.max, 2**53)).long().to(dtype)


def random_freqs(axes: int, heads: int, pairs: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of both signs and magnitudes from 1 down to 1e-3, as schemes have them."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.rand((axes, heads, pairs), generator=generator, dtype=torch.float64) * 2 - 1
    return (direction * 1000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)).to(dtype)


@st.composite
def _broadcast_from(draw, lead, least_dims: int):
    """Leading dims that broadcast to ``lead``: all, the last few, or some of size 1."""
    how = draw(st.sampled_from(["all", "last", "ones"]))
    if how == "last":
        return lead[draw(st.integers(0, max(len(lead) - least_dims, 0))) :]
    if how == "ones":
        return [1 if draw(st.booleans()) else size for size in lead]
    return lead


def layouts(pairs: int):
    """Every name or number of channels that ``layout`` may be."""
    blocks = [2 * half for half in range(1, pairs + 1) if pairs % half == 0]
    return st.sampled_from(["interleaved", "half", *blocks])


@st.composite
def calls(
    draw,
    dtypes=EMBEDDING_DTYPES,
    position_dtypes=POSITION_DTYPES,
    freq_dtypes=EMBEDDING_DTYPES,
    half_dims=HALF_DIMS,
    memory_kinds=tuple(MEMORY_KINDS),
    extents=(0.0, 1.0, 40.0, 1000.0),
    max_dims=3,
    special=True,
    broadcast_x=True,
) -> Call:
    """A valid call: shapes, dtypes, memory, settings and values. Small, as each angle is computed by mpmath.

    ``broadcast_x=False``: the result has the shape of ``x``.
    """
    pairs = draw(st.sampled_from(half_dims))
    heads = draw(st.integers(1, 4 if pairs < 20 else 2))
    axes = draw(st.integers(1, 4))
    freq_heads = draw(st.sampled_from([1, heads]))
    lead = draw(st.lists(st.integers(0, 3 if pairs < 20 else 2), min_size=0, max_size=max_dims))
    head_dim_first = draw(st.booleans()) and len(lead) > 0
    prefix = draw(st.integers(0, 3)) if lead else 0

    least_dims = 1 if head_dim_first or prefix else 0
    x_lead = list(draw(_broadcast_from(lead, least_dims))) if broadcast_x else list(lead)
    position_lead = draw(_broadcast_from(lead, 0))
    if prefix:
        # a token alone after a prefix, for several positions, is left to tests of its own
        x_lead[-1] = lead[-1] + prefix
    offset = draw(st.integers(0, 3))
    head_dim = offset + 2 * pairs + draw(st.integers(0, 2)) * 2 + offset % 2
    shape = [*x_lead[:-1], heads, x_lead[-1], head_dim] if head_dim_first else [*x_lead, heads, head_dim]

    dtype, position_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(position_dtypes))
    kinds = st.sampled_from(memory_kinds)
    x_memory, freqs_memory = draw(kinds), draw(kinds)
    positions_memory = draw(kinds) if position_lead else "contiguous"
    seed = draw(st.integers(0, 1000))
    x = random_embeddings(shape, dtype, seed, special and draw(st.booleans()))
    positions = random_positions(
        [*position_lead, axes], position_dtype, draw(st.sampled_from(extents)), seed + 1
    )
    freqs = random_freqs(axes, freq_heads, pairs, draw(st.sampled_from(freq_dtypes)), seed + 2)
    return Call(
        x=in_memory(x, x_memory),
        positions=in_memory(positions, positions_memory) if position_lead else positions,
        freqs=in_memory(freqs, freqs_memory),
        settings={
            "layout": draw(layouts(pairs)),
            "rotary_offset": offset,
            "num_prefix_tokens": prefix,
            "head_dim_first": head_dim_first,
            "inverse": draw(st.booleans()),
        },
        x_memory=x_memory,
        positions_memory=positions_memory,
        freqs_memory=freqs_memory,
    )


# ---- exact results


def exact_array(tensor: Tensor) -> np.ndarray:
    """Embeddings as long doubles, which lose nothing."""
    wide = tensor.detach().double() if tensor.dtype != torch.float64 else tensor.detach()
    return wide.numpy().astype(np.longdouble)


def _long_double(value) -> np.longdouble:
    high = float(value)
    return np.longdouble(high) + np.longdouble(float(value - high))


def exact_cos_sin(positions: Tensor, freqs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of ``sum_a positions[..., a] * freqs[a]``, ``[..., H, F]``, of the values as stored."""
    axes, heads, pairs = freqs.shape
    rows = positions.reshape(-1, axes).tolist()
    columns = freqs.reshape(axes, heads * pairs).T.tolist()
    cos, sin = np.empty((2, len(rows), heads * pairs), dtype=np.longdouble)
    with mpmath.workprec(420):
        exact_columns = [[mpmath.mpf(f) for f in column] for column in columns]
        for t, row in enumerate(rows):
            exact_row = [mpmath.mpf(p) for p in row]
            for i, column in enumerate(exact_columns):
                angle = mpmath.fdot(exact_row, column)
                with mpmath.workprec(120):
                    c, s = mpmath.cos_sin(angle)
                    cos[t, i], sin[t, i] = _long_double(c), _long_double(s)
    shape = (*positions.shape[:-1], heads, pairs)
    return cos.reshape(shape), sin.reshape(shape)


def pair_channels(pairs: int, layout: str | int, rotary_offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The two channels of each pair."""
    block = {"interleaved": 2, "half": 2 * pairs}.get(layout, layout)
    pair = np.arange(pairs)
    first = rotary_offset + pair // (block // 2) * block + pair % (block // 2)
    return first, first + block // 2


def exact_rotation(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
    cos_sin: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """``apply_rope`` in long doubles."""
    cos, sin = cos_sin or exact_cos_sin(positions, freqs)
    values = exact_array(x)
    if head_dim_first:
        values = np.swapaxes(values, -3, -2)
    lead, prefix = list(values.shape[:-2]), num_prefix_tokens
    if prefix:
        lead[-1] -= prefix
    lead = list(np.broadcast_shapes(tuple(lead), cos.shape[:-2]))
    y = np.empty(
        (*lead[:-1], lead[-1] + prefix, *values.shape[-2:]) if prefix else (*lead, *values.shape[-2:]),
        dtype=np.longdouble,
    )
    if prefix:
        y[..., :prefix, :, :] = values[..., :prefix, :, :]
        rest, values = y[..., prefix:, :, :], values[..., prefix:, :, :]
    else:
        rest = y
    rest[...] = values
    first, second = pair_channels(freqs.shape[-1], layout, rotary_offset)
    x0, x1 = values[..., first], values[..., second]
    sin = -sin if inverse else sin
    rest[..., first] = x0 * cos - x1 * sin
    rest[..., second] = x0 * sin + x1 * cos
    return np.swapaxes(y, -3, -2) if head_dim_first else y


# Largest distance of a rotated pair from the exact one, in units of eps(dtype) * norm of the pair. Measured
# over 3e5 pairs: 1.9 with one axis, 2.7 with two, 3.3 with four, the most that is drawn. Half types are
# computed in float32 and rounded once: half a unit in the last place on top of the budget of float32.
BUDGET = {torch.float32: 4.0, torch.float64: 4.0}


def smallest_subnormal(dtype: torch.dtype) -> np.longdouble:
    return np.longdouble(torch.finfo(dtype).smallest_normal) * np.longdouble(torch.finfo(dtype).eps)


def pair_errors(
    actual: Tensor, exact: np.ndarray, pairs: int, layout: str | int, rotary_offset: int = 0
) -> np.ndarray:
    """Distance of each rotated pair from the exact one, in units of the norm of the pair."""
    first, second = pair_channels(pairs, layout, rotary_offset)
    difference = exact_array(actual) - exact
    distance = np.hypot(difference[..., first], difference[..., second])
    norm = np.hypot(exact[..., first], exact[..., second])
    # below the normal range all numbers are multiples of the smallest, whatever the norm
    distance = np.where(distance <= 2 * smallest_subnormal(actual.dtype), 0, distance)
    return np.divide(
        distance, norm, out=np.where(distance == 0, 0, np.inf).astype(np.longdouble), where=norm > 0
    )


def half_ulp(exact: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half the distance between neighbors of ``dtype`` around each value."""
    limits = torch.finfo(dtype)
    exponent = np.frexp(np.maximum(np.abs(exact), limits.smallest_normal))[1] - 1
    return np.ldexp(np.longdouble(limits.eps / 2), exponent)


def assert_rotated(
    actual: Tensor, exact: np.ndarray, pairs: int, layout: str | int, rotary_offset: int = 0
) -> None:
    """``actual`` is the exact rotation to the budget of its dtype; half types are rounded once."""
    assert tuple(actual.shape) == exact.shape
    if actual.dtype in BUDGET:
        errors = pair_errors(actual, exact, pairs, layout, rotary_offset)
        assert errors.size == 0 or errors.max() <= BUDGET[actual.dtype] * torch.finfo(actual.dtype).eps
        return
    first, second = pair_channels(pairs, layout, rotary_offset)
    norm = np.hypot(exact[..., first], exact[..., second])
    slack = BUDGET[torch.float32] * torch.finfo(torch.float32).eps * norm + 2 * smallest_subnormal(
        torch.float32
    )
    for channels in (first, second):
        wanted = exact[..., channels]
        error = np.abs(exact_array(actual)[..., channels] - wanted)
        assert (error <= half_ulp(wanted, actual.dtype) + slack).all()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: signs of zeros count, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(integers), b.detach().contiguous().view(integers))


def whole_storage(x: Tensor) -> Tensor:
    """Every byte of the memory that ``x`` is a part of."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
