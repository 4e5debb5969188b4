"""torch.ops.nd_rotary at their limits: what the C code refuses, and what it must still do right."""

import gc
import re
import weakref

import pytest
import torch
from conftest import EMULATION
from torch import Tensor

from nd_rotary_encodings import _C, apply_rope, apply_rope_, reference, rotate_embeddings
from nd_rotary_encodings._ops import DEFAULT_SETTINGS

ops = torch.ops.nd_rotary


def zeros(*shape):
    return torch.zeros(shape or (2, 3, 2, 8))


X, P, F, A = torch.ones(3, 2, 8), torch.ones(3, 2), torch.ones(2, 2, 4), torch.ones(2, 3, 2, 4)
F4 = F[:, None]
ONES_15, ONES_16 = (1,) * 15, (1,) * 16
NEEDS = (True, True, True)


# ---- refused by the C code: what Python checks first is checked again before memory is touched

ROTATION_ERRORS = {
    "embeddings of one dim": ((zeros(8), P, F), "need the dims of heads and channels"),
    "embeddings of no dim": ((zeros(1)[0], P, F), "need the dims of heads and channels"),
    "integer embeddings": ((zeros().int(), P, F), "must be float16, bfloat16, float32 or float64"),
    "bool embeddings": ((zeros().bool(), P, F), "must be float16, bfloat16, float32 or float64"),
    "complex embeddings": ((zeros().cfloat(), P, F), "must be float16, bfloat16, float32 or float64"),
    "float8 embeddings": (
        (zeros().to(torch.float8_e5m2), P, F),
        "must be float16, bfloat16, float32 or float64",
    ),
    "bool positions": ((zeros(), P.bool(), F), "positions must be integers or floating point"),
    "complex positions": ((zeros(), P.cfloat(), F), "positions must be integers or floating point"),
    "positions without dims": ((zeros(), P[0, 0], F), "positions need 1 dim or more"),
    "frequencies of two dims": ((zeros(), P, F[0]), "freqs 3"),
    "frequencies of four dims": ((zeros(), P, F4), "freqs 3"),
    "integer frequencies": ((zeros(), P, F.int()), "freqs must be floating point"),
    "other number of axes": ((zeros(), torch.ones(3, 3), F), "the same number of axes"),
    "no axes": ((zeros(), P[:, :0], F[:0]), "at least 1"),
    "other number of heads": ((zeros(), P, torch.ones(2, 3, 4)), "1 head or those of the embeddings"),
    "too many pairs": ((zeros(), P, torch.ones(2, 2, 5)), "must lie inside the head"),
    "offset too large": ((zeros(), P, F, 0, 2, 1), "must lie inside the head"),
    "offset negative": ((zeros(), P, F[..., :2], 0, 2, -1), "must lie inside the head"),
    "offset near overflow": ((zeros(), P, F, 0, 2, 2**63 - 4), "must lie inside the head"),
    "block of 0": ((zeros(), P, F, 0, 0), "whole blocks of an even number"),
    "block of 3": ((zeros(), P, F, 0, 3), "whole blocks of an even number"),
    "block of 3 that divides": (
        (zeros(3, 2, 12), P, torch.ones(2, 2, 6), 0, 3),
        "whole blocks of an even number",
    ),
    "block of 6": ((zeros(), P, F, 0, 6), "whole blocks of an even number"),
    "block negative": ((zeros(), P, F, 0, -2), "whole blocks of an even number"),
    "block near overflow": ((zeros(), P, F, 0, 2**62), "whole blocks of an even number"),
    "prefix negative": ((zeros(), P, F, 0, 2, 0, -1), "fewer tokens than prefix tokens"),
    "prefix too long": ((zeros(), P, F, 0, 2, 0, 4), "fewer tokens than prefix tokens"),
    "prefix near overflow": ((zeros(), P, F, 0, 2, 0, 2**63 - 1), "fewer tokens than prefix tokens"),
    "prefix and all positions": ((zeros(), P, F, 0, 2, 0, 1), "can't be broadcast"),
    "prefix without tokens": ((zeros(2, 8), P[0], F, 0, 2, 0, 1), "need a dim of tokens"),
    "heads first without tokens": ((zeros(2, 8), P[0], F, 0, 2, 0, 0, True), "need a dim of tokens"),
    "heads that do not divide": ((zeros(2, 3, 16), P, F, 3), "can't be split into heads"),
    "heads negative": ((zeros(2, 3, 16), P, F, -2), "can't be split into heads"),
    "heads joined and first": ((zeros(2, 3, 16), P, F, 2, 2, 0, 0, True), "can't be split into heads"),
    "leading dims": ((zeros(), torch.ones(4, 2), F), "can't be broadcast"),
    "17 dims": ((zeros(*ONES_15, 2, 8), P[0], F), "at most 16 dimensions"),
    "17 dims after splitting heads": ((zeros(*ONES_15, 16), P[0], F, 2), "can't be split into heads"),
    "positions of 17 dims": ((zeros(), torch.ones(*ONES_16, 2), F), "at most 16 dimensions"),
    "result of 17 dims": ((zeros(2, 8), torch.ones(*ONES_15, 2), F), "more than 16 dimensions|not have more"),
    "frequencies of 17 dims": ((zeros(), P, torch.ones(*ONES_16, 2)), "at most 16 dimensions"),
}
OTHER_ERRORS = {
    "no tensor": (ops._rotate, (None, P, F), "not a plain strided tensor"),
    "in place, positions larger": (
        ops._rotate_,
        (zeros(1, 3, 2, 8), torch.ones(2, 3, 2), F),
        "more or larger leading dims",
    ),
    "in place, positions with more dims": (
        ops._rotate_,
        (zeros(), torch.ones(1, 2, 3, 2), F),
        "more or larger leading dims",
    ),
    "in place, expanded": (ops._rotate_, (zeros(1, 3, 2, 8).expand(2, 3, 2, 8), P, F), "may not be expanded"),
    "gradient of another shape": (
        ops._rotate_backward,
        (zeros(1, 3, 2, 8), zeros(), P, F, *DEFAULT_SETTINGS, *NEEDS),
        "shape and dtype of the output",
    ),
    "gradient of another dtype": (
        ops._rotate_backward,
        (zeros().double(), zeros(), P, F, *DEFAULT_SETTINGS, *NEEDS),
        "shape and dtype of the output",
    ),
    "gradient that misses dims": (
        ops._rotate_backward,
        (zeros(), zeros(), torch.ones(1, 2, 3, 2), F, *DEFAULT_SETTINGS, *NEEDS),
        "more dims than the gradient",
    ),
    "gradient that was not broadcast": (
        ops._rotate_backward,
        (zeros(1, 3, 2, 8), zeros(1, 3, 2, 8), torch.ones(2, 3, 2), F, *DEFAULT_SETTINGS, *NEEDS),
        "must have the broadcast shape",
    ),
    "gradient of integer positions": (
        ops._rotate_backward,
        (zeros(), zeros(), P.long(), F, *DEFAULT_SETTINGS, *NEEDS),
        "integer positions have no gradient",
    ),
    "backward, wrong frequencies": (
        ops._rotate_backward,
        (zeros(), zeros(), P, F4, *DEFAULT_SETTINGS, *NEEDS),
        "freqs 3",
    ),
    "angles of fewer dims": (ops._rotate_by_angles, (zeros(), A[0]), "the same number of dims"),
    "angles of other pairs": (ops._rotate_by_angles, (zeros(), A[..., :3]), "half as many channels"),
    "angles of other heads": (
        ops._rotate_by_angles,
        (zeros(), torch.ones(2, 3, 3, 4)),
        "1 head or those of the embeddings",
    ),
    "angles, one dim": (ops._rotate_by_angles, (zeros(8), A[0, 0, 0]), "need the dims of heads and channels"),
    "angles, integer embeddings": (ops._rotate_by_angles, (zeros().int(), A), "must be float16"),
    "integer angles": (ops._rotate_by_angles, (zeros(), A.int()), "angles must be floating point"),
    "angles, leading dims": (ops._rotate_by_angles, (zeros(), torch.ones(4, 3, 2, 4)), "can't be broadcast"),
    "angles, 17 dims": (
        ops._rotate_by_angles,
        (zeros(*ONES_15, 2, 8), torch.ones(*ONES_15, 2, 4)),
        "at most 16 dimensions",
    ),
    "angles in place, larger": (ops._rotate_by_angles_, (zeros(1, 3, 2, 8), A), "larger leading dims"),
    "angles in place, expanded": (
        ops._rotate_by_angles_,
        (zeros(1, 3, 2, 8).expand(2, 3, 2, 8), A),
        "may not be expanded",
    ),
    "angles in place, other pairs": (ops._rotate_by_angles_, (zeros(), A[..., :3]), "half as many channels"),
    "angles, gradient of another shape": (
        ops._rotate_by_angles_backward,
        (zeros(1, 3, 2, 8), zeros(), A, True, True),
        "shape and dtype of the embeddings",
    ),
    "angles, gradient of another dtype": (
        ops._rotate_by_angles_backward,
        (zeros().double(), zeros(), A, True, True),
        "shape and dtype of the embeddings",
    ),
    "angles, gradient that was not broadcast": (
        ops._rotate_by_angles_backward,
        (zeros(1, 3, 2, 8), zeros(1, 3, 2, 8), A, True, True),
        "angles must broadcast to the embeddings",
    ),
    "calculation, bool positions": (
        ops._calculate_angles,
        (P.bool(), F4),
        "must be integers or floating point",
    ),
    "calculation, integer frequencies": (
        ops._calculate_angles,
        (P, F4.int()),
        "freqs must be floating point",
    ),
    "calculation, frequencies of three dims": (ops._calculate_angles, (P, F), "freqs 4"),
    "calculation, positions without dims": (
        ops._calculate_angles,
        (P[0, 0], F4),
        "positions need 2 to 15 dims",
    ),
    "calculation, positions of 16 dims": (
        ops._calculate_angles,
        (torch.ones(*ONES_15, 2), F4),
        "2 to 15 dims",
    ),
    "calculation, other number of axes": (
        ops._calculate_angles,
        (torch.ones(3, 3), F4),
        "the same number of axes",
    ),
    "calculation, no axes": (ops._calculate_angles, (P[:, :0], F4[:0]), "at least 1"),
}


def assert_refused(op, arguments, message):
    before = [a.clone() for a in arguments if isinstance(a, Tensor)]
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)
    assert _C.live_handles() == 0
    after = [a for a in arguments if isinstance(a, Tensor)]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(after, before, strict=True)
        if a.ndim
    )


@pytest.mark.parametrize("op", [ops._rotate, ops._rotate_, ops.apply_rope], ids=str)
@pytest.mark.parametrize(("arguments", "message"), ROTATION_ERRORS.values(), ids=ROTATION_ERRORS.keys())
def test_rotation_refuses(arguments, message, op):
    assert_refused(op, arguments, message)


@pytest.mark.parametrize(("arguments", "message"), ROTATION_ERRORS.values(), ids=ROTATION_ERRORS.keys())
def test_backward_refuses_what_the_rotation_does(arguments, message):
    arguments = (*arguments, *DEFAULT_SETTINGS[len(arguments) - 3 :])
    if "17 dims" in message or "more than 16" in message:
        message = "16 dimensions|more dims than the gradient"
    assert_refused(ops._rotate_backward, (arguments[0].clone(), *arguments, *NEEDS), message)


@pytest.mark.parametrize(("op", "arguments", "message"), OTHER_ERRORS.values(), ids=OTHER_ERRORS.keys())
def test_operator_refuses(op, arguments, message):
    assert_refused(op, arguments, message)


def test_sixteen_dims_are_enough_for_anybody():
    embeddings, positions = torch.randn(*ONES_15[1:], 2, 8), torch.randn(*ONES_15[1:], 2)
    expected = reference.apply_rope(embeddings, positions, F)
    torch.testing.assert_close(ops._rotate(embeddings, positions, F), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(ops._rotate(embeddings[(0,) * 14], positions, F).shape, expected.shape)


def test_tensors_are_freed_after_results_and_errors():
    embeddings = zeros()
    watched = weakref.ref(embeddings)
    storage = embeddings.untyped_storage()
    used = storage._use_count() if hasattr(storage, "_use_count") else None
    for _ in range(3):
        ops._rotate(embeddings, P, F)
        with pytest.raises(RuntimeError):
            ops._rotate(embeddings, P, F4)
    if used is not None:
        assert storage._use_count() == used
    del embeddings
    gc.collect()
    assert watched() is None


# ---- sizes and memory


def wide(t: Tensor, dim: int, n: int) -> Tensor:
    return t.narrow(dim, 0, 1).expand(*(n if d == dim else m for d, m in enumerate(t.shape)))


LARGE = {
    "embeddings": (ops._rotate, (wide(X, 0, 2**45), P[0], F), "at most 2^47 elements"),
    "embeddings in place": (ops._rotate_, (wide(X, 0, 2**45), P[0], F), "at most 2^47 elements"),
    "embeddings without channels": (
        ops._rotate,
        (wide(X[..., :0], 0, 2**60), P[0], F),
        "at most 2^47 elements",
    ),
    "positions": (ops._rotate, (X, wide(P, 0, 2**60), F), "at most 2^47 elements"),
    "frequencies": (ops._rotate, (X, P, wide(F, 2, 2**58)), "at most 2^47 elements"),
    "groups": (ops._calculate_angles, (P, wide(F4, 1, 2**58)), "at most 2^47 elements"),
    "angles": (ops._rotate_by_angles, (X, wide(A[0], 0, 2**58)), "at most 2^47 elements"),
    "heads of no channels": (ops._rotate, (X[..., 0, :0], P, F, 2**62), "can't be split into heads"),
    "result of too many elements": (
        ops._rotate,
        (wide(X[:1], 0, 2**40), wide(P[:1, None], 0, 2**40), F),
        "the result would have more than 2^47 elements",
    ),
    "angles of too many elements": (
        ops._calculate_angles,
        (wide(P, 0, 2**40), wide(F4, 3, 2**40)),
        "the result would have more than 2^47 elements",
    ),
    "result of more than memory": (
        ops._rotate,
        (wide(X.double(), 0, 2**43), P[:1], F),
        "the result could not be allocated",
    ),
    "scratch of more than memory": (
        ops._rotate,
        (X, wide(P, 1, 2**45), wide(F[:, :1, :1], 0, 2**45)),
        "axes are too many for the CUDA kernels" if EMULATION else "out of memory",
    ),
}


@pytest.mark.parametrize(("op", "arguments", "text"), LARGE.values(), ids=LARGE.keys())
def test_sizes_beyond_memory_are_refused(op, arguments, text):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        op(*arguments)


def test_strides_of_a_tensor_without_elements_mean_nothing():
    x = torch.empty(0).as_strided((5, 5, 2, 0), (2**62, 2**61, 1, 1))
    angles = torch.empty(0).as_strided((5, 1, 2, 0), (2**62, 2**61, 2**62, 1))
    assert ops._rotate_by_angles(x, angles).shape == x.shape
    ops._rotate_by_angles_(x, angles)
    assert ops._rotate_by_angles_backward(x, x, angles, True, True)[1].shape == angles.shape
    assert ops._rotate(x, torch.ones(5, 2), F[..., :0]).shape == x.shape
    joined = torch.empty(0).as_strided((0, 8), (1, 2**62))
    assert ops._rotate(joined, torch.ones(1, 2), F[..., :1], 2).shape == joined.shape


NO_MEMORY = {
    "embeddings": (ops._rotate, (X, P, F), 0),
    "embeddings in place": (ops._rotate_, (X, P, F), 0),
    "positions": (ops._rotate, (X, P, F), 1),
    "frequencies": (ops._rotate, (X, P, F), 2),
    "angles": (ops._rotate_by_angles, (X, A[0]), 1),
    "gradient": (ops._rotate_by_angles_backward, (X, X, A[0], True, True), 0),
    "frequencies in groups": (ops._calculate_angles, (P, F4), 1),
}


@pytest.mark.parametrize(("op", "arguments", "at"), NO_MEMORY.values(), ids=NO_MEMORY.keys())
def test_a_tensor_whose_storage_was_freed_is_refused(op, arguments, at):
    freed = arguments[at].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="a tensor has no memory of its own"):
        op(*arguments[:at], freed, *arguments[at + 1 :])


OTHER_LAYOUTS = {
    "sparse": lambda t: t.to_sparse(),
    "compressed rows": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}
CALLS = {
    "_rotate": (X, P, F),
    "apply_rope": (X, P, F),
    "_rotate_": (X, P, F),
    "_rotate_backward": (X, X, P, F, 0, 2, 0, 0, False, False, *NEEDS),
    "_rotate_qk": (X, X, P, F),
    "apply_rope_qk": (X, X, P, F),
    "_rotate_qk_backward": (X, X, X, X, P, F, 0, 2, 0, 0, False, False, *NEEDS),
    "_rotate_by_angles": (X, A[0]),
    "rotate_embeddings": (X, A[0]),
    "_rotate_by_angles_": (X, A[0]),
    "_rotate_by_angles_backward": (X, X, A[0], True, True),
    "_calculate_angles": (P, F4),
    "calculate_rope": (P, F4),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("change", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS.keys())
@pytest.mark.parametrize("name", CALLS)
def test_tensors_in_other_layouts_are_refused(name, change):
    """Arithmetic with sparse positions would leave out angles without a word."""
    arguments = CALLS[name]
    for at, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            with pytest.raises(RuntimeError, match="all tensors must be strided and not quantized"):
                getattr(ops, name)(*arguments[:at], change(argument), *arguments[at + 1 :])


def test_a_prefix_of_all_tokens_takes_no_step_past_them():
    x = torch.rand(2, 8).as_strided((1, 2, 8), (2**62, 8, 1))
    positions = torch.ones(1, 2)
    assert torch.equal(ops._rotate(x, positions, F, 0, 2, 0, 1), x)
    settings = (0, 2, 0, 1, False, False)
    _, of_positions, of_freqs = ops._rotate_backward(x, x, positions, F, *settings, *NEEDS)
    assert not of_positions.any() and not of_freqs.any()
    no_pairs = ops._rotate_backward(x, x, positions, F[..., :0], *settings, *NEEDS)
    assert torch.equal(no_pairs[0], x)


def lazily_negative(t: Tensor) -> Tensor:
    """Minus ``t`` as PyTorch has it as the imaginary part of a conjugate."""
    view = torch.complex(t, t).conj().imag
    assert view.is_neg()
    return view


IN_PLACE = {
    "_rotate_": (lambda x: ops._rotate_(x, lazily_negative(P), F), lambda x: ops._rotate(x, -P, F)),
    "_rotate_by_angles_": (
        lambda x: ops._rotate_by_angles_(x, lazily_negative(A[0])),
        lambda x: ops._rotate_by_angles(x, -A[0]),
    ),
    "apply_rope_": (
        lambda x: apply_rope_(x, P, F, layout="half"),
        lambda x: apply_rope(x, P, F, layout="half"),
    ),
    "rotate_embeddings": (
        lambda x: rotate_embeddings(x, A[0], needs_autograd=False),
        lambda x: rotate_embeddings(x, A[0]),
    ),
}


@pytest.mark.parametrize(("write", "expected"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_a_lazily_negative_view_is_rotated_in_place(write, expected):
    values = torch.rand(3, 2, 8)
    view, plain = lazily_negative(values), values.clone()
    before = view._base.real.clone()
    write(view)
    write(plain)
    assert torch.equal(view, expected(-values))
    assert torch.equal(plain, expected(values))
    assert torch.equal(view._base.real, before)


def test_angles_without_pairs_have_a_derivative():
    positions, freqs = P.clone().requires_grad_(), F4[..., :0].clone().requires_grad_()
    angles = ops.calculate_rope(positions, freqs)
    of_positions, of_freqs = torch.autograd.grad(angles, (positions, freqs), torch.ones(3, 2, 0))
    assert torch.equal(of_positions, torch.zeros(3, 2))
    assert of_freqs.shape == freqs.shape


def test_angles_need_the_dims_in_every_way_that_their_derivative_needs():
    with pytest.raises(RuntimeError, match="positions need 2 to 15 dims"):
        ops.calculate_rope(P[0], F4)
