"""Arbitrary calls of ``torch.ops.nd_rotary.*``, past the checks in Python: each returns what the definition
gives, or raises and changes nothing.

As a program it goes on for a given time and reports what came, which ``make fuzz`` does on a build with
sanitizers. Each call is drawn from a number of its own: ``python tests/test_fuzz.py --first 1234 --calls 1``
repeats one.
"""

import argparse
import collections
import contextlib
import math
import random
import re
import resource
import tempfile
import time
import warnings

import pytest
import torch
from strategies import EMBEDDING_DTYPES, INTEGER_DTYPES, POSITION_DTYPES
from torch import Tensor

from nd_rotary_encodings import _C, reference

ops = torch.ops.nd_rotary
OTHERS = (
    *(torch.bool, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
)
# Memory refuses all of them; smaller ones it might grant, and sizes in between would take forever.
HUGE = (2**46, 2**47, 2**48, 2**53, 2**61, 2**62, 2**63 - 1)
NUMBERS = (
    *(0, 1, 2, 3, 4, 6, 8, 16, 17, -1, -2, -3, 2**31 - 1, 2**31, 2**32, 2**47, 2**61),
    *(2**62, 2**63 - 4, 2**63 - 2, 2**63 - 1, -(2**62), -(2**63) + 1, -(2**63)),
)
NO_ARGUMENTS = (None, 1.5, "x", [], 2**63, -(2**63) - 1, torch.float32)
# NotImplementedError is a RuntimeError; None has no attributes of a tensor
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, MemoryError)


# ---- tensors


def is_huge(shape) -> bool:
    return any(n >= 2**40 for n in shape)


def special_values(dtype: torch.dtype) -> list:
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        tiny = limits.smallest_normal
        return [0.0, -0.0, math.nan, math.inf, -math.inf, limits.max, limits.min, tiny, -tiny * limits.eps]
    limits = torch.iinfo(dtype)
    return [limits.min, limits.max, limits.max - 1, 0, 1]


def values(rng: random.Random, shape, dtype: torch.dtype) -> Tensor:
    """Ordinary ones; where a size is huge, one entry stands for all."""
    small = [1 if is_huge([n]) else n for n in shape]
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    t = torch.randn(small, generator=generator, dtype=torch.float64) * rng.choice((1, 1, 1, 30))
    return (t if dtype.is_floating_point else t.abs().round().long()).to(dtype).expand(*shape)


def placed(rng: random.Random, t: Tensor, expand: bool) -> Tensor:
    """The values in a buffer of their own: dims in any order, gaps, an offset, and something else around."""
    if is_huge(t.shape):
        return t
    if expand and t.ndim and rng.random() < 0.1:
        dim = rng.randrange(t.ndim)
        base = placed(rng, t.narrow(dim, 0, min(1, t.shape[dim])), False)
        return base.expand(t.shape)
    order, strides, step = list(range(t.ndim)), [0] * t.ndim, 1
    if rng.random() < 0.4:
        rng.shuffle(order)
    for dim in reversed(order):
        step *= rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
        strides[dim] = step
        step *= max(t.shape[dim], 1)
    offset = rng.choice((0, 0, 1, 5))
    buffer = torch.ones(offset + step + 3, dtype=torch.float64).to(t.dtype)
    return buffer.as_strided(t.shape, strides, offset).copy_(t)


def size(rng: random.Random, least: int = 1, most: int = 4) -> int:
    """Seldom 0, seldom huge."""
    kind = rng.random()
    if kind < 0.02:
        return 0
    return rng.choice(HUGE) if kind < 0.05 else rng.randint(least, most)


def shorter(rng: random.Random, lead: list[int]) -> list[int]:
    """Leading dims that broadcast to ``lead``."""
    lead = lead[rng.randint(0, len(lead)) if rng.random() < 0.2 else 0 :]
    return [1 if rng.random() < 0.2 else n for n in lead]


# ---- valid calls


class Call:
    def __init__(self, name: str, arguments: list, writes: bool = False):
        self.name, self.arguments, self.writes = name, arguments, writes
        self.changed = False  # whether anything may be wrong with it
        self.comparable = True  # whether its values can be computed in another way, as far as arguments say

    @property
    def tensors(self) -> list[Tensor]:
        return [a for a in self.arguments if isinstance(a, Tensor)]

    @property
    def huge(self) -> bool:
        return any(is_huge(t.shape) for t in self.tensors)

    @property
    def endless(self) -> bool:
        """Whether it may be valid, allocate little, and take years."""
        first, *_ = self.arguments
        if "backward" in self.name:
            needs_first = self.arguments[-2 if "angles" in self.name else -3]
            return isinstance(first, Tensor) and is_huge(first.shape) and not needs_first
        *_, freqs = self.arguments
        return "calculate" in self.name and isinstance(freqs, Tensor) and is_huge(freqs.shape[1:2])

    def __call__(self):
        return getattr(ops, self.name)(*self.arguments)


def rotation(rng: random.Random, name: str) -> Call:
    writes, backward = name == "_rotate_", name == "_rotate_backward"
    lead = [size(rng) for _ in range(rng.randint(0, 3))]
    head_first = bool(lead) and rng.random() < 0.3
    n_heads, axes, pairs = size(rng, most=3), max(size(rng), 1), rng.choice((0, 1, 2, 3, 4, 6, 8, 9, 16, 17))
    offset = rng.choice((0, 0, 0, 1, 2, 5))
    head_dim = offset + 2 * pairs + rng.choice((0, 0, 0, 1, 3))
    if rng.random() < 0.02:
        head_dim = rng.choice(HUGE)
        pairs = rng.choice((pairs, head_dim // 4))
    joined = (
        not head_first and n_heads and head_dim and not is_huge((n_heads, head_dim)) and rng.random() < 0.3
    )
    blocks = [2 * half for half in range(1, min(pairs, 20) + 1) if pairs % half == 0] or [2, 4]
    prefix = rng.randint(0, min(lead[-1], 3)) if lead and rng.random() < 0.3 else 0
    positions_lead = shorter(rng, [*lead[:-1], lead[-1] - prefix] if lead else [])
    if not (writes or backward):
        lead = [*(1 if rng.random() < 0.1 else n for n in lead[:-1]), *lead[-1:]]
        if len(positions_lead) == len(lead) and rng.random() < 0.2:
            positions_lead = [size(rng), *positions_lead]
    shape = [*lead, n_heads * head_dim] if joined else [*lead, n_heads, head_dim]
    if head_first:
        shape = [*lead[:-1], n_heads, lead[-1], head_dim]
    dtype = rng.choice(EMBEDDING_DTYPES)
    x = placed(rng, values(rng, shape, dtype), not writes)
    positions = placed(rng, values(rng, [*positions_lead, axes], rng.choice(POSITION_DTYPES)), True)
    freqs = values(rng, [axes, rng.choice((1, n_heads)), pairs], rng.choice(EMBEDDING_DTYPES))
    settings = [n_heads if joined else 0, rng.choice(blocks), offset, prefix, head_first, rng.random() < 0.3]
    arguments = [x, positions, placed(rng, freqs, True), *settings]
    if not backward:
        return Call(name, arguments, writes)
    grad = placed(rng, values(rng, shape, dtype), True)
    needs = [rng.random() < 0.8, positions.is_floating_point() and rng.random() < 0.8, rng.random() < 0.8]
    return Call(name, [grad, *arguments, *needs])


def rotation_of_two(rng: random.Random, name: str) -> Call:
    single = rotation(rng, name.replace("_qk", ""))
    if "backward" in name:
        grad, y, *others = single.arguments
        new = [values(rng, t.shape, t.dtype) for t in (grad, grad, y, y)]  # which lie alike
        call = Call(name, [*new, *others])
        at = rng.randrange(4)
        if rng.random() < 0.2:
            call.arguments[at] = placed(rng, new[at], True)
            call.changed = True
        return call
    query, *others = single.arguments
    kind = rng.random()
    key = values(rng, query.shape, query.dtype if kind < 0.8 else rng.choice(EMBEDDING_DTYPES))
    return Call(name, [query, key if kind < 0.5 else placed(rng, key, True), *others])


def rotation_by_angles(rng: random.Random, name: str) -> Call:
    writes, backward = name == "_rotate_by_angles_", name == "_rotate_by_angles_backward"
    lead, n_heads, pairs = [size(rng) for _ in range(rng.randint(0, 3))], size(rng, most=3), size(rng, 0, 20)
    if is_huge([pairs]):
        pairs //= 2
    angles_lead = [1 if rng.random() < 0.2 else n for n in lead]
    if not (writes or backward):
        lead = [1 if rng.random() < 0.1 else n for n in lead]
    dtype, shape = rng.choice(EMBEDDING_DTYPES), [*lead, n_heads, 2 * pairs]
    x = placed(rng, values(rng, shape, dtype), not writes)
    angles = values(rng, [*angles_lead, rng.choice((1, n_heads)), pairs], rng.choice(EMBEDDING_DTYPES))
    arguments = [x, placed(rng, angles, True)]
    if not backward:
        return Call(name, arguments, writes)
    grad = placed(rng, values(rng, shape, dtype), True)
    return Call(name, [grad, *arguments, rng.random() < 0.8, rng.random() < 0.8])


def calculation(rng: random.Random, name: str) -> Call:
    lead, axes = [size(rng) for _ in range(rng.randint(1, 3))], max(size(rng), 1)
    positions = values(rng, [*lead, axes], rng.choice(POSITION_DTYPES))
    freqs = values(rng, [axes, size(rng), size(rng, most=3), size(rng, 0, 9)], rng.choice(EMBEDDING_DTYPES))
    return Call(name, [placed(rng, positions, True), placed(rng, freqs, True)])


OPERATORS = {
    "_rotate": rotation,
    "apply_rope": rotation,
    "_rotate_": rotation,
    "_rotate_backward": rotation,
    "_rotate_qk": rotation_of_two,
    "apply_rope_qk": rotation_of_two,
    "_rotate_qk_backward": rotation_of_two,
    "_rotate_by_angles": rotation_by_angles,
    "rotate_embeddings": rotation_by_angles,
    "_rotate_by_angles_": rotation_by_angles,
    "_rotate_by_angles_backward": rotation_by_angles,
    "_calculate_angles": calculation,
    "calculate_rope": calculation,
}


# ---- what may be wrong


def with_special_values(rng, t):
    t = t.clone()
    kinds = torch.tensor(special_values(t.dtype), dtype=t.dtype)
    index = torch.tensor([rng.randrange(3 * len(kinds)) for _ in range(t.numel())], dtype=torch.long).view(
        t.shape
    )
    chosen = kinds.view(torch.uint8).view(len(kinds), -1)[index % len(kinds)].flatten(-2).view(t.dtype)
    return torch.where(index < len(kinds), chosen.view(t.shape), t)


def with_more_dims(rng, t):
    return t[(None,) * rng.choice((1, 1, 2, 12, 13, 14, 15, 16))]


def with_fewer_dims(rng, t):
    return t.select(rng.randrange(t.ndim), 0)


def with_another_size(rng, t):
    dim = rng.randrange(t.ndim)
    kind = rng.random()
    if kind < 0.3:
        return t.narrow(dim, 0, 0)
    if kind < 0.6:
        return t.narrow(dim, 0, t.shape[dim] - 1)
    return torch.cat((t, t.narrow(dim, 0, 1)), dim)


def expanded(rng, t):
    dim, shape = rng.randrange(t.ndim), list(t.shape)
    shape[dim] = rng.choice((2, t.shape[dim], *HUGE))
    return t.narrow(dim, 0, 1).expand(shape)


def overlapping(rng, t):
    return t.as_strided(t.shape, [min(s, rng.choice((0, 1, 1, 2))) for s in t.stride()])


def with_far_strides(rng, t):
    """Of dims along which no step is ever made."""
    empty = t.numel() == 0
    strides = [
        2**62 if (empty or n == 1) and rng.random() < 0.7 else s
        for n, s in zip(t.shape, t.stride(), strict=True)
    ]
    return t.as_strided(t.shape, strides)


def with_requires_grad(rng, t):
    leaf = t.detach().requires_grad_()
    return rng.choice((leaf, leaf, torch.nn.Parameter(t.detach()), leaf * 1, leaf.view_as(leaf)))


def without_memory(rng, t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def of_another_dtype(rng, t):
    return t.to(rng.choice(POSITION_DTYPES + OTHERS))


def quantized(rng, t):
    return torch.quantize_per_tensor(t.float(), 0.1, 0, rng.choice((torch.qint8, torch.quint8)))


# fit for huge tensors, too
CHANGES_OF_VIEWS = (
    with_more_dims,
    with_fewer_dims,
    expanded,
    with_far_strides,
    lambda rng, t: torch._neg_view(t),
    lambda rng, t: t.to("meta"),
)
CHANGES = (
    *CHANGES_OF_VIEWS,
    *(with_special_values,) * 5,
    *(with_another_size,) * 2,
    *(with_requires_grad,) * 4,
    *(of_another_dtype,) * 2,
    overlapping,
    without_memory,
    quantized,
    lambda rng, t: torch.complex(t, t).conj().imag,
    lambda rng, t: torch.complex(t, t).conj(),
    lambda rng, t: torch._lazy_clone(t),
    lambda rng, t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    lambda rng, t: t.to_sparse(),
    lambda rng, t: t.to_sparse_csr(),
    lambda rng, t: t.to_mkldnn(),
)


def has_memory(t: Tensor) -> bool:
    storage = storage_of(t)
    return storage is None or storage.numel() > 0 or t.numel() == 0


def change(rng: random.Random, call: Call) -> None:
    at = rng.randrange(len(call.arguments))
    argument = call.arguments[at]
    call.changed = True
    if rng.random() < 0.05:
        others = call.tensors if isinstance(argument, Tensor) else []
        call.arguments[at] = rng.choice((*NO_ARGUMENTS, *others))
        call.comparable = False
    elif isinstance(argument, bool):
        call.arguments[at] = not argument
    elif isinstance(argument, int):
        call.arguments[at] = rng.choice(NUMBERS)
    elif isinstance(argument, Tensor) and has_memory(argument) and not argument.is_quantized:
        # what else is done to a tensor without memory or to a quantized one may crash PyTorch itself
        with contextlib.suppress(Exception):  # not every change fits every tensor
            call.arguments[at] = rng.choice(CHANGES_OF_VIEWS if call.huge else CHANGES)(rng, argument)


def draw(number: int) -> Call | None:
    """Call number so and so; None where it can't be made."""
    rng = random.Random(number)
    name = rng.choice(list(OPERATORS))
    try:
        call = OPERATORS[name](rng, name)
    except RuntimeError:  # of two huge sizes
        return None
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        change(rng, call)
    return None if call.endless else call


# ---- what must hold


def storage_of(t: Tensor) -> Tensor | None:
    """All bytes that ``t`` lies in, where it has memory on the CPU."""
    if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized or t._is_zerotensor():
        return None
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def bytes_of_elements(t: Tensor, storage: Tensor) -> Tensor:
    mask = torch.zeros(storage.numel() // t.element_size(), dtype=torch.bool)
    mask.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
    return mask.repeat_interleave(t.element_size())


def is_comparable(call: Call) -> bool:
    """Whether its values can be computed in another way."""
    if call.huge or not call.comparable:
        return False
    if not all(
        storage_of(t) is not None and has_memory(t) and t.dtype in POSITION_DTYPES for t in call.tensors
    ):
        return False
    x = call.arguments[0]
    overlaps = call.writes and bytes_of_elements(x, storage_of(x)).sum() < x.numel() * x.element_size()
    return not overlaps


def exact(t: Tensor) -> Tensor:
    """A copy of the values in float64."""
    t = t.detach()
    if t.is_neg() and t.dtype in INTEGER_DTYPES:  # PyTorch can't negate all of them
        t = torch._neg_view(t).to(torch.int64).neg().to(t.dtype)
    return torch.empty(t.shape, dtype=torch.float64).copy_(t)


def rows(t: Tensor, settings: list) -> Tensor:
    """As [..., N, H, D]."""
    heads, _, _, _, head_first, _ = settings
    if heads:
        return t.unflatten(-1, (heads, -1))
    return t.transpose(-3, -2) if head_first else t


def angles_of(positions: Tensor, freqs: Tensor) -> Tensor:
    return (positions[..., None, None] * (freqs.sum(1) if freqs.ndim == 4 else freqs)).sum(-3)


def largest(t: Tensor) -> Tensor:
    return t.abs().amax(-1) if t.shape[-1] else t.sum(-1)


def assert_rotated(y: Tensor, tensors: list[Tensor], settings: list) -> None:
    """Each head within a few roundings of its largest channel, where the angles are known so well."""
    x, *operands = tensors
    expected = reference.apply_rope(*tensors, *settings) if settings else reference.rotate_by_angles(*tensors)
    assert y.shape == expected.shape
    bounds = angles_of(*(t.abs() for t in operands)) if settings else operands[0].abs()
    if settings:
        y, expected, x = (rows(t, settings) for t in (y, expected, x))
        prefix = settings[3]
        if prefix:
            first = x[..., :prefix, :, :].expand(*y.shape[:-3], prefix, *y.shape[-2:])
            assert torch.equal(y[..., :prefix, :, :].double().nan_to_num(7), first.nan_to_num(7))
            y, expected, x = (t[..., prefix:, :, :] for t in (y, expected, x))
    limits = torch.finfo(y.dtype)
    bound, amplitude, error = torch.broadcast_tensors(
        largest(bounds), largest(x), largest(y.double() - expected)
    )
    allowed = amplitude * (4 * limits.eps + bound * 2**-50) + limits.smallest_normal * limits.eps
    sure = (bound < 2**40) & (amplitude < limits.max / 4)
    assert (error <= allowed)[sure].all()


def assert_calculated(angles: Tensor, tensors: list[Tensor]) -> None:
    expected, bound = angles_of(*tensors), angles_of(*(t.abs() for t in tensors))
    limits = torch.finfo(angles.dtype)
    assert angles.shape == expected.shape
    allowed = bound * (limits.eps + 2**-50) + limits.smallest_normal * limits.eps
    assert ((angles - expected).abs() <= allowed)[bound < limits.max / 2].all()


def gradients(kind, tensors: list[Tensor], settings: list, grad: Tensor):
    """Of all tensors, and the sums of the magnitudes of what is added up in each."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    sizes = [t.abs().requires_grad_() for t in tensors]
    if kind is calculation:
        expected = torch.autograd.grad(angles_of(*leaves), leaves, grad)
        return expected, torch.autograd.grad(angles_of(*sizes), sizes, grad.abs())
    if kind is rotation:
        y, angles = reference.apply_rope(*leaves, *settings), angles_of(*sizes[1:])
        x_rows, grad_rows = rows(tensors[0], settings), rows(grad, settings)
        if settings[3]:
            x_rows, grad_rows = (t[..., settings[3] :, :, :] for t in (x_rows, grad_rows))
    else:
        y, angles = reference.rotate_by_angles(*leaves), sizes[1] * 1
        x_rows, grad_rows = tensors[0], grad
    expected = torch.autograd.grad(y, leaves, grad, allow_unused=True, materialize_grads=True)
    by_angle = (2 * largest(x_rows) * largest(grad_rows))[..., None]
    by_angle = by_angle.expand(*by_angle.shape[:-1], angles.shape[-1])
    largest_angle = float(angles.max()) if angles.numel() else 0.0  # the definition rounds it: 2**-50 of it
    of_x = torch.full_like(expected[0], float(grad.abs().sum()) * (1 + largest_angle / 16))
    return expected, (of_x, *torch.autograd.grad(angles, sizes[1:], by_angle.sum_to_size(angles.shape)))


def assert_gradients(
    kind, results: list, tensors: list[Tensor], settings: list, grad: Tensor, eps: float
) -> None:
    """``results`` are None where not asked for."""
    if not all(bool((t.abs() < 1e3).all()) for t in (*tensors, grad)):
        return
    for result, expected, scale in zip(results, *gradients(kind, tensors, settings, grad), strict=True):
        if result is None:
            continue
        limits = torch.finfo(result.dtype)
        allowed = scale * 64 * max(eps, limits.eps) + limits.smallest_normal
        assert result.shape == expected.shape
        assert ((result.double() - expected).abs() <= allowed)[scale < limits.max / 2].all()


def assert_result(call: Call, result, copies: list[Tensor], generator: random.Random) -> None:
    kind = OPERATORS[call.name]
    settings = [a for a in call.arguments if not isinstance(a, Tensor)]
    if kind in (rotation, rotation_of_two) and not copies[-1].shape[-1]:
        settings[1] = 2  # without pairs any block will do, and in the definition overflow
    eps = max(torch.finfo(t.dtype).eps for t in call.tensors if t.is_floating_point())
    if "backward" in call.name:
        if kind is rotation_of_two:  # as one call with one more dim
            copies = [torch.stack(copies[:2]), torch.stack(copies[2:4]), *copies[4:]]
            of_x = torch.stack(result[:2]) if result[0].shape == copies[0].shape[1:] else result[0]
            kind, result = rotation, (of_x, *result[2:])
        count = len(result)
        needs, settings = settings[-count:], settings[:-count]
        grad, x, *operands = copies
        if kind is rotation:  # of the output
            x = reference.apply_rope(x, *operands, *settings[:-1], not settings[-1])
        results = [r if need else None for r, need in zip(result, needs, strict=True)]
        assert_gradients(kind, results, [x, *operands], settings, grad, eps)
        return
    if kind is rotation_of_two:
        for y, x in zip(result, copies[:2], strict=True):
            assert_rotated(y.detach(), [x, *copies[2:]], settings)
        return
    y = call.arguments[0] if call.writes else result
    if kind is calculation:
        assert_calculated(y.detach(), copies)
    else:
        assert_rotated(y.detach(), copies, settings)
    if y.requires_grad and call.name in ("apply_rope", "rotate_embeddings", "calculate_rope"):
        grad = values(generator, y.shape, y.dtype)
        wanted = [t for t in call.tensors if t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad))
        results = [next(found) if t.requires_grad else None for t in call.tensors]
        assert_gradients(kind, results, copies, settings, grad.double(), eps)


def check(call: Call, number: int) -> str:
    """Makes the call; returns what became of it."""
    kept = [(t, storage_of(t)) for t in call.tensors]
    kept = [(t, storage, storage.clone()) for t, storage in kept if storage is not None]
    copies = [exact(t) for t in call.tensors] if is_comparable(call) else None
    try:
        result, outcome = call(), "returned"
    except ERRORS as error:
        assert call.changed or call.huge, f"refused, though nothing is wrong with it: {error}"
        result, outcome = None, f"{type(error).__name__}: {error}"
    assert _C.live_handles() == 0
    for _, storage, before in kept:
        same = storage == before
        if call.writes and outcome == "returned" and storage.data_ptr() == kept[0][1].data_ptr():
            same |= bytes_of_elements(kept[0][0], storage)
        assert same.all(), "wrote where nothing is to be written"
    if copies is not None and outcome == "returned":
        assert_result(call, result, copies, random.Random(number))
    return outcome


def describe(call: Call) -> str:
    def text(argument) -> str:
        if not isinstance(argument, Tensor):
            return repr(argument)
        memory = argument.stride() if argument.layout == torch.strided else argument.layout
        return f"{argument.dtype} {list(argument.shape)} {memory}"

    return f"{call.name}({', '.join(text(a) for a in call.arguments)})"


def run(numbers, note=lambda number: None) -> collections.Counter:
    """How often each operator returned or raised what."""
    outcomes = collections.Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            note(number)
            call = draw(number)
            if call is None:
                continue
            _C.stream_from(0 if number % 2 else None)
            try:
                outcomes[call.name, check(call, number)] += 1
            except BaseException as error:
                raise AssertionError(f"call {number}: {describe(call)}") from error
            finally:
                _C.stream_from(None)
    return outcomes


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_arbitrary_calls_return_what_the_definition_gives_or_raise_and_change_nothing(first):
    outcomes = run(range(first, first + 500))
    returned = collections.Counter()
    for (name, outcome), count in outcomes.items():
        returned[name] += count if outcome == "returned" else 0
    # neither nothing but errors nor no errors
    assert set(returned) == set(OPERATORS)
    assert all(returned.values())
    assert 0.4 < returned.total() / outcomes.total() < 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--calls", type=int, help="this many instead of some seconds")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    number, outcomes, memory = options.first, collections.Counter(), []
    with tempfile.NamedTemporaryFile("w", prefix="call-", delete=False) as last:
        print(f"where this dies, {last.name} has the number of the call", flush=True)

        def note(number):
            last.seek(0)
            last.write(f"{number}\n")
            last.flush()

        while number < options.first + options.calls if options.calls else time.monotonic() < end:
            outcomes += run(range(number, number + min(1000, options.calls or 1000)), note)
            number += 1000
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    returned = sum(count for (_, outcome), count in outcomes.items() if outcome == "returned")
    print(f"{outcomes.total()} calls, no fault: {returned} returned, {outcomes.total() - returned} raised")
    print(f"memory at most {memory[len(memory) // 2] >> 10} MiB in the first half, {memory[-1] >> 10} in all")
    by_text = collections.Counter()
    for (_, outcome), count in outcomes.items():
        by_text[re.sub(r"\d+", "#", outcome.split("\n")[0])[:100]] += count
    for outcome, count in by_text.most_common():
        print(f"{count:8} {outcome}")


if __name__ == "__main__":
    main()
