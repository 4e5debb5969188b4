"""Reverse mode: gradients of first and higher order, in place, and what they keep and leave alone."""

import itertools
import math

import pytest
import torch
from conftest import saved_storages
from small_cases import CASES, double, every_case, every_qkv_case, every_subset, in_place_of, inputs_of
from strategies import INTEGER_DTYPES, name
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from nd_rotary_encodings import RoPEEncodingND, apply_rope, apply_rope_, apply_rope_qkv_


def gradients_by_formula(grad_y, y, positions, freqs):
    """dx = R^T g, dangle = g1 y0 - g0 y1, dp_a = sum f_a dangle and df_a = sum p_a dangle, in float64.

    For interleaved pairs. The second result are the latter two sums with each term's magnitude.
    """
    grad_y, y, positions, freqs = (t.detach().double() for t in (grad_y, y, positions, freqs))
    angles = torch.einsum("...p,phf->...hf", positions, freqs)
    g0, g1, y0, y1 = grad_y[..., ::2], grad_y[..., 1::2], y[..., ::2], y[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    grad_x = torch.stack([g0 * cos + g1 * sin, g1 * cos - g0 * sin], -1).flatten(-2)
    first, second = g1 * y0, g0 * y1
    grad_angle, size = first - second, first.abs() + second.abs()
    grad_positions = torch.einsum("...hf,phf->...p", grad_angle, freqs)
    grad_freqs = torch.einsum("...hf,...p->phf", grad_angle, positions)
    position_size = torch.einsum("...hf,phf->...p", size, freqs.abs())
    freq_size = torch.einsum("...hf,...p->phf", size, positions.abs())
    return (grad_x, grad_positions, grad_freqs), (position_size, freq_size)


# ---- reverse mode


@every_subset
@every_case
def test_gradcheck(case, needs):
    inputs, options = inputs_of(case, needs)
    assert gradcheck(lambda *args: apply_rope(*args, **options), inputs)


@every_case
def test_gradgradcheck(case):
    inputs, options = inputs_of(case)
    assert gradgradcheck(lambda *args: apply_rope(*args, **options), inputs)


@every_subset
@pytest.mark.parametrize("name", ["shared heads", "half", "heads first, prefix", "x broadcast, prefix"])
def test_gradgradcheck_of_some_inputs(name, needs):
    inputs, options = inputs_of(CASES[name], needs)
    assert gradgradcheck(lambda *args: apply_rope(*args, **options), inputs)


@every_case
def test_gradcheck_in_place(case):
    (x, positions, freqs), options = inputs_of(case)
    lead = x.shape[:-3] + x.shape[-2:-1] if options.get("head_dim_first") else x.shape[:-2]
    if len(positions.shape) - 1 > len(lead) or (len(lead) > 1 and lead[0] == 1):
        x = double(2, *x.shape[-3:], requires_grad=True)
    assert gradcheck(lambda *args: in_place_of(apply_rope_)(*args, **options), (x, positions, freqs))
    assert gradgradcheck(lambda *args: in_place_of(apply_rope_)(*args, **options), (x, positions, freqs))


@every_subset
@every_qkv_case
def test_gradcheck_of_a_packed_projection(case, needs):
    inputs, options = inputs_of(case, needs)
    function = in_place_of(apply_rope_qkv_)
    assert gradcheck(lambda *args: function(*args, **options), inputs, check_batched_grad=True)


@every_qkv_case
def test_gradgradcheck_of_a_packed_projection(case):
    inputs, options = inputs_of(case)
    assert gradgradcheck(lambda *args: in_place_of(apply_rope_qkv_)(*args, **options), inputs)


def test_third_order_gradients():
    x, p, f = (
        double(1, 1, 2, requires_grad=True),
        double(1, 1, requires_grad=True),
        double(1, 1, 1, requires_grad=True),
    )
    y = apply_rope(x, p, f)[0, 0, 0]
    values = [y.item()]
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), p, create_graph=True)
        values.append(y.item())
    x0, x1, angle = x[0, 0, 0].item(), x[0, 0, 1].item(), (p * f).item()
    # derivatives of x0 cos(pf) - x1 sin(pf) by p: quarter turns ahead, times f each
    expected = [
        f.item() ** n * (x0 * math.cos(angle + n * math.pi / 2) - x1 * math.sin(angle + n * math.pi / 2))
        for n in range(4)
    ]
    assert values == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_subset
def test_gradients_are_those_of_the_saved_output_rounded_once(needs, dtype):
    """Reduced in at least float32, so that nothing but the rounding of the output is lost."""
    inputs = [
        torch.randn(3, 40, 2, 18).to(dtype),
        torch.randn(3, 40, 2) * 30,
        torch.randn(2, 2, 9),
    ]
    leaves = [t.requires_grad_() for t, need in zip(inputs, needs, strict=True) if need]
    y = apply_rope(*inputs)
    g = torch.randn_like(y)
    actual = iter(torch.autograd.grad(y, leaves, g))
    expected, (position_size, freq_size) = gradients_by_formula(g, y, *inputs[1:])
    if needs[0]:
        grad_x = next(actual)
        assert grad_x.dtype == dtype
        pair = expected[0].unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
        error = (grad_x.double() - expected[0]).abs() / pair
        assert error.max() < 2 * torch.finfo(dtype).eps
    if needs[1]:
        assert ((next(actual).double() - expected[1]).abs() / position_size).max() < 1e-6
    if needs[2]:
        assert ((next(actual).double() - expected[2]).abs() / freq_size).max() < 1e-6


def test_frequency_gradient_does_not_lose_small_terms_among_many_tokens():
    """One large term and 20,000 small ones, each below half a unit in the last place of the large one."""
    x = torch.zeros(20001, 1, 2)
    x[..., 0] = 1
    positions = torch.full((20001, 1), 1e-8)
    positions[0] = 1
    g = torch.zeros(20001, 1, 2)
    g[..., 1] = 1
    freqs = torch.zeros(1, 1, 1, requires_grad=True)
    (grad_freqs,) = torch.autograd.grad(apply_rope(x, positions, freqs), freqs, g)
    assert grad_freqs.item() == pytest.approx(1 + 20000e-8, rel=1e-6)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=name)
def test_training_with_integer_positions(dtype):
    positions = torch.arange(12).view(2, 3, 2)
    x, freqs = double(2, 3, 2, 4, requires_grad=True), double(2, 2, 2, requires_grad=True)
    g = double(2, 3, 2, 4)
    y = apply_rope(x, positions.to(dtype), freqs)
    expected, _ = gradients_by_formula(g, y, positions, freqs)
    actual = torch.autograd.grad(y, (x, freqs), g)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(actual[1], expected[2], rtol=0, atol=1e-11)


# ---- memory layout of gradients


def odd_gradients(shape):
    *lead, heads, channels = shape
    wide = double(*lead, heads, 2 * channels)
    return {
        "stride 0": torch.ones((), dtype=torch.float64).expand(shape),
        "expanded over heads": double(*lead, 1, channels).expand(shape),
        "every other channel": wide[..., ::2],
        "channels outside": double(channels, *lead, heads).movedim(0, -1),
        "heads outside": double(heads, *lead, channels).movedim(0, -2),
        "odd offset": wide.flatten()[1 : 1 + math.prod(shape)].view(shape),
    }


@pytest.mark.parametrize("name", odd_gradients((1, 1, 1)).keys())
@every_subset
def test_gradients_of_any_strides_are_read_right_and_left_alone(name, needs):
    inputs = [double(2, 3, 2, 6), double(2, 3, 2), double(2, 2, 3)]
    leaves = [t.requires_grad_() for t, need in zip(inputs, needs, strict=True) if need]
    g = odd_gradients((2, 3, 2, 6))[name]
    before, version = g.clone(), g._version
    y = apply_rope(*inputs)
    actual = torch.autograd.grad(y, leaves, g)
    expected, _ = gradients_by_formula(before, y, *inputs[1:])
    for a, b in zip(actual, (e for e, need in zip(expected, needs, strict=True) if need), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    assert torch.equal(g, before)
    assert g._version == version


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.parametrize("needs", [(True, False, False), (True, True, True)], ids=["x", "all"])
def test_gradient_of_a_dense_input_has_its_strides(order, needs):
    """So that AccumulateGrad takes the gradient over instead of copying it."""
    inverse = [order.index(d) for d in range(4)]
    x = double(*(5 - d for d in order)).permute(inverse)
    x = x[..., :4].clone(memory_format=torch.preserve_format).requires_grad_(needs[0])
    positions, freqs = double(x.shape[1], 2), double(2, x.shape[2], x.shape[3] // 2)
    positions.requires_grad_(needs[1])
    freqs.requires_grad_(needs[2])
    y = apply_rope(x, positions, freqs)
    assert y.stride() == x.stride()
    assert torch.autograd.grad(y.sin().sum(), x)[0].stride() == x.stride()


def test_gradient_of_an_input_that_is_not_dense_is_contiguous():
    positions, freqs = double(3, 2), double(2, 2, 2)
    for x in (double(2, 3, 2, 8)[..., ::2], double(1, 3, 2, 4).expand(2, 3, 2, 4)):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(apply_rope(x, positions, freqs).sin().sum(), x)
        assert gradient.is_contiguous()


def strided_inputs():
    return {
        "transposed": (
            double(3, 2, 2, 6).transpose(0, 1),
            double(2, 3).t(),
            double(3, 2, 2).permute(2, 1, 0),
        ),
        "slices": (double(2, 3, 3, 2, 6)[:, :, 1], double(3, 5)[:, 2:4], double(2, 2, 6)[..., ::2]),
        "expanded": (
            double(1, 3, 2, 6).expand(2, 3, 2, 6),
            double(1, 2).expand(3, 2),
            double(2, 1, 3).expand(2, 2, 3),
        ),
        "flipped steps": (
            double(2, 6, 2, 12)[:, ::2, :, ::2],
            double(6, 4)[::2, ::2],
            double(4, 4, 3)[::2, ::2],
        ),
    }


@pytest.mark.parametrize("name", strided_inputs().keys())
def test_gradients_of_strided_inputs_are_those_of_contiguous_ones(name):
    strided = [t.requires_grad_() for t in strided_inputs()[name]]
    contiguous = [t.detach().contiguous().requires_grad_() for t in strided]
    results = []
    for leaves in (strided, contiguous):
        y = apply_rope(*leaves)
        results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---- using the graph


def test_nothing_is_recorded_where_nothing_requires_grad():
    inputs = (double(3, 2, 4), double(3, 2), double(2, 2, 2))
    assert apply_rope(*inputs).grad_fn is None
    with torch.no_grad():
        assert apply_rope(inputs[0].clone().requires_grad_(), *inputs[1:]).grad_fn is None
    assert apply_rope(inputs[0].clone().requires_grad_(), *inputs[1:]).grad_fn is not None


def test_graph_may_be_walked_twice():
    inputs = [
        double(3, 2, 4, requires_grad=True),
        double(3, 2, requires_grad=True),
        double(2, 2, 2, requires_grad=True),
    ]
    y = apply_rope(*inputs)
    first = torch.autograd.grad(y.sin().sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(y.sin().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_two_uses_are_added():
    x, freqs = double(3, 2, 4, requires_grad=True), double(2, 2, 2, requires_grad=True)
    near, far = double(3, 2), double(3, 2) * 10
    one, other = double(3, 2, 4), double(3, 2, 4)
    y, z = apply_rope(x, near, freqs), apply_rope(x, far, freqs)
    actual = torch.autograd.grad((y * one).sum() + (z * other).sum(), (x, freqs))
    parts = [gradients_by_formula(one, y, near, freqs)[0], gradients_by_formula(other, z, far, freqs)[0]]
    torch.testing.assert_close(actual[0], parts[0][0] + parts[1][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(actual[1], parts[0][2] + parts[1][2], rtol=0, atol=1e-12)


def test_rotation_there_and_back_has_the_gradient_of_the_identity():
    x, positions, freqs = (
        double(3, 2, 4, requires_grad=True),
        double(3, 2, requires_grad=True),
        double(2, 2, 2),
    )
    freqs.requires_grad_()
    back = apply_rope(apply_rope(x, positions, freqs), positions, freqs, inverse=True)
    g = double(3, 2, 4)
    gradients = torch.autograd.grad(back, (x, positions, freqs), g)
    torch.testing.assert_close(gradients[0], g, rtol=0, atol=1e-12)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_retained_gradient_of_an_intermediate_is_the_inverse_rotation():
    base, positions, freqs = double(3, 2, 4, requires_grad=True), double(3, 2), double(2, 2, 2)
    x = base * 2
    x.retain_grad()
    before = x.detach().clone()
    apply_rope(x, positions, freqs).sum().backward()
    expected = apply_rope(torch.ones_like(before), -positions, freqs)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(base.grad, 2 * expected, rtol=0, atol=1e-12)
    assert torch.equal(x, before)


def test_gradients_accumulate_over_calls():
    x, positions, freqs = (
        double(3, 2, 4, requires_grad=True),
        double(3, 2),
        double(2, 2, 2, requires_grad=True),
    )
    for _ in range(2):
        apply_rope(x, positions, freqs).sin().sum().backward()
    once = torch.autograd.grad(apply_rope(x, positions, freqs).sin().sum(), (x, freqs))
    assert torch.equal(x.grad, 2 * once[0])
    assert torch.equal(freqs.grad, 2 * once[1])


def test_a_key_without_a_use_gets_no_gradient():
    module = RoPEEncodingND(2, 8, 2)
    query, key = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    rotated = module(query, torch.arange(6).view(3, 2), key)
    rotated[0].sum().backward()
    assert query.grad is not None
    assert key.grad is None or not key.grad.any()


def test_output_changed_before_the_backward_is_noticed():
    """The backward of positions and frequencies reads the output."""
    x, positions, freqs = (
        double(3, 2, 4, requires_grad=True),
        double(3, 2),
        double(2, 2, 2, requires_grad=True),
    )
    y = apply_rope(x, positions, freqs)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_may_be_changed_where_only_x_needs_a_gradient():
    x, positions, freqs = double(3, 2, 4, requires_grad=True), double(3, 2), double(2, 2, 2)
    y = apply_rope(x, positions, freqs)
    y.mul_(2)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = apply_rope(torch.full_like(x, 2.0), positions, freqs, inverse=True)
    torch.testing.assert_close(gradient, expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode():
    module = RoPEEncodingND(2, 8, 2)
    query, positions = torch.randn(3, 8, requires_grad=True), (torch.rand(3, 2) * 9).requires_grad_()
    leaves = [query, positions, module.freqs[0]]
    expected = torch.autograd.grad(module(query, positions).sin().sum(), leaves)
    with torch.autograd.set_detect_anomaly(True):
        actual = torch.autograd.grad(module(query, positions).sin().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_torch_checkpoint(use_reentrant):
    module = RoPEEncodingND(2, 8, 2)
    query, positions = torch.randn(3, 8, requires_grad=True), (torch.rand(3, 2) * 9).requires_grad_()
    leaves = [query, positions, module.freqs[0]]
    module(query, positions).sin().sum().backward()
    expected = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    checkpoint(module, query, positions, use_reentrant=use_reentrant).sin().sum().backward()
    assert all(torch.equal(leaf.grad, e) for leaf, e in zip(leaves, expected, strict=True))


@every_subset
def test_what_is_saved(needs):
    """Positions and frequencies; the output if its angles need a gradient; the input never."""
    inputs = [double(3, 2, 4), double(3, 2), double(2, 2, 2)]
    for tensor, need in zip(inputs, needs, strict=True):
        tensor.requires_grad_(need)
    saved, y = saved_storages(lambda: apply_rope(*inputs))
    kept = [*inputs[1:], y] if needs[1] or needs[2] else inputs[1:]
    assert set(saved) == {tensor.untyped_storage().data_ptr() for tensor in kept}


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
def test_what_is_saved_may_be_kept_elsewhere(in_place):
    """As by hooks that move saved tensors to another device or to a file, and give back copies."""
    inputs = [double(*shape, requires_grad=True) for shape in ((3, 2, 4), (3, 2), (2, 2, 2))]

    def gradients():
        x = inputs[0] * 1
        y = apply_rope_(x, *inputs[1:]) if in_place else apply_rope(x, *inputs[1:])
        return torch.autograd.grad(y.sin().sum(), inputs)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().tolist(), double_from_list):
        actual = gradients()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def double_from_list(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


def test_deterministic_algorithms_change_nothing(deterministic):
    module = RoPEEncodingND(2, 16, 2, freq_group_pattern=[[1, 0], [1, 1]])
    query, positions = torch.randn(3, 5, 16, requires_grad=True), (torch.rand(5, 2) * 9).requires_grad_()
    leaves = [query, positions, *module.freqs]
    results = []
    for mode in (False, True):
        deterministic(mode)
        rotated = module(query, positions)
        first = torch.autograd.grad(rotated.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)
        results.append((rotated, *first, *second))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- in place


@every_subset
@every_case
def test_in_place_has_the_results_of_out_of_place(case, needs):
    (x, positions, freqs), options = inputs_of(case, needs)
    if case in (CASES["x broadcast"], CASES["x with fewer dims"], CASES["x broadcast, prefix"]):
        x = double(2, *x.shape[-3:], requires_grad=needs[0])
    leaves = [t for t, need in zip((x, positions, freqs), needs, strict=True) if need]
    outside, inside = apply_rope(x, positions, freqs, **options), x * 1
    version, address = inside._version, inside.data_ptr()
    rotated = apply_rope_(inside, positions, freqs, **options)
    assert rotated is inside
    assert rotated.data_ptr() == address
    assert rotated._version > version
    assert torch.equal(rotated, outside)
    actual = torch.autograd.grad(rotated.sin().sum(), leaves)
    expected = torch.autograd.grad(outside.sin().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@every_qkv_case
def test_packed_projection_has_the_results_of_its_parts(case):
    leaves, options = inputs_of(case)
    at = -4 if options.get("head_dim_first") else -3
    parts = list(leaves[0].unbind(at))
    parts[:2] = (apply_rope(part, *leaves[1:], **options) for part in parts[:2])
    outside, qkv = torch.stack(parts, at), leaves[0] * 1
    version = qkv._version
    inside = apply_rope_qkv_(qkv, *leaves[1:], **options)
    assert inside is qkv
    assert qkv._version > version
    assert torch.equal(inside, outside)
    g = double(*qkv.shape)
    actual = torch.autograd.grad(inside, leaves, g)
    expected = torch.autograd.grad(outside, leaves, g)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    # the values' gradient passes through
    assert torch.equal(actual[0].select(at, 2), g.select(at, 2))


def test_packed_projection_keeps_nothing_but_itself():
    weight = double(24, 8, requires_grad=True)
    positions, freqs = double(5, 2, requires_grad=True), double(2, 2, 2, requires_grad=True)
    x = double(5, 8)

    def rotate():
        qkv = (x @ weight.t()).view(5, 3, 2, 4)
        return apply_rope_qkv_(qkv, positions, freqs)

    saved, qkv = saved_storages(rotate)
    assert set(saved) == {t.untyped_storage().data_ptr() for t in (x, positions, freqs, qkv)}


def test_in_place_for_gradients_of_x_keeps_no_embeddings():
    x, positions, freqs = double(3, 2, 4, requires_grad=True) * 1, double(3, 2), double(2, 2, 2)
    saved, _ = saved_storages(lambda: apply_rope_(x, positions, freqs))
    assert set(saved) == {t.untyped_storage().data_ptr() for t in (positions, freqs)}


def test_in_place_on_a_view_of_a_projection_reaches_the_projection():
    weight, tokens = double(12, 4, requires_grad=True), double(5, 4)
    positions, freqs = double(5, 2), double(2, 1, 2, requires_grad=True)

    def loss(in_place):
        qkv = (tokens @ weight.t()).view(5, 3, 1, 4)
        if in_place:
            apply_rope_(qkv[:, 1], positions, freqs)
        else:
            qkv = torch.stack([qkv[:, 0], apply_rope(qkv[:, 1], positions, freqs), qkv[:, 2]], 1)
        return qkv.sin().sum()

    actual, expected = (torch.autograd.grad(loss(in_place), (weight, freqs)) for in_place in (True, False))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_in_place_on_a_tensor_without_grad_joins_the_graph_of_its_positions():
    x, positions, freqs = double(3, 2, 4), double(3, 2, requires_grad=True), double(2, 2, 2)
    outside = apply_rope(x, positions, freqs)
    apply_rope_(x, positions, freqs)
    assert x.requires_grad
    g = double(3, 2, 4)
    assert torch.equal(*(torch.autograd.grad(y, positions, g)[0] for y in (x, outside)))


def test_value_saved_before_a_rotation_in_place_is_noticed():
    x, positions, freqs = double(3, 2, 4, requires_grad=True) * 1, double(3, 2), double(2, 2, 2)
    square = x * x
    apply_rope_(x, positions, freqs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def leaf(*shape):
    x = double(*shape, requires_grad=True)
    return x, x


def part_of_leaf(*shape):
    base = double(*shape[:-1], 2 * shape[-1], requires_grad=True)
    return base, base[..., : shape[-1]]


def part_of_several(*shape):
    """PyTorch refuses to modify one of several views that one function returned."""
    base = double(2, *shape, requires_grad=True) * 1
    return base, base.unbind(0)[0]


def view_of_part_of_several(*shape):
    base, x = part_of_several(*shape)
    return base, x.view(x.shape)


@pytest.mark.parametrize(
    ("make_x", "message"),
    [
        (leaf, "a leaf Variable that requires grad"),
        (part_of_leaf, "a view of a leaf Variable that requires grad"),
        (part_of_several, "is a view and is being modified inplace"),
        (view_of_part_of_several, "is a view and is being modified inplace"),
    ],
)
@pytest.mark.parametrize("function", [apply_rope_, apply_rope_qkv_])
def test_in_place_raises_pytorchs_error_and_writes_nothing(function, make_x, message):
    base, x = make_x(3, 3, 2, 4)
    positions, freqs = double(3, 2), double(2, 2, 2)
    before, version = base.detach().clone(), base._version
    with pytest.raises(RuntimeError, match=message):
        function(x, positions, freqs)
    assert torch.equal(base, before)
    assert base._version == version


class TenfoldGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 10 * grad


def linear_with_a_hook(layer, x):
    layer.register_full_backward_hook(lambda *_: None)
    return layer(x)


@pytest.mark.parametrize(
    "project",
    [
        lambda layer, x: TenfoldGradient.apply(layer(x)),
        lambda layer, x: checkpoint(layer, x, use_reentrant=True),
        linear_with_a_hook,
    ],
    ids=["Function", "checkpoint", "hook"],
)
@pytest.mark.parametrize("learned", [True, False])
def test_in_place_refuses_a_view_whose_own_backward_would_be_skipped(project, learned):
    layer, module = nn.Linear(4, 24), RoPEEncodingND(2, 8, 2).requires_grad_(learned)
    qkv = project(layer, torch.randn(2, 3, 4, requires_grad=True))
    before, version = qkv.detach().clone(), qkv._version
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        module.rotate_qkv_(qkv, torch.arange(6).view(3, 2))
    assert torch.equal(qkv, before)
    assert qkv._version == version


def test_packed_projection_beside_its_base_in_one_storage_is_rotated_itself():
    storage = double(72)
    base, before = storage[:36].detach(), storage.clone()
    qkv = base.as_strided((3, 3, 2, 2), (12, 4, 2, 1), 36)
    assert qkv._base.data_ptr() != qkv.data_ptr()
    positions, freqs = double(3, 2), double(2, 2, 1, requires_grad=True)
    apply_rope_qkv_(qkv, positions, freqs)
    assert torch.equal(storage[:36], before[:36])
    assert torch.equal(qkv[:, 0], apply_rope(before[36:].view(3, 3, 2, 2)[:, 0], positions, freqs))


def test_in_place_on_a_leaf_is_allowed_without_grad_mode():
    x, positions, freqs = double(3, 3, 2, 4, requires_grad=True), double(3, 2), double(2, 2, 2)
    expected = apply_rope(x.detach(), positions, freqs)
    with torch.no_grad():
        apply_rope_(x, positions, freqs)
    assert torch.equal(x, expected)
    assert x.is_leaf


# ---- in a model


def test_attention_trains_to_a_lower_loss():
    """Relative positions are all that tells the tokens of this task apart."""
    rope, project = RoPEEncodingND(1, 8, 1), nn.Linear(8, 16)
    optimizer = torch.optim.Adam([*rope.parameters(), *project.parameters()], lr=0.05)
    tokens, positions = torch.randn(8).expand(6, 8), torch.arange(6)[:, None]
    target = torch.roll(torch.eye(6), 1, 0)
    losses = []
    for _ in range(60):
        query, key = project(tokens).chunk(2, -1)
        query, key = rope(query, positions, key)
        loss = (torch.softmax(query @ key.t(), -1) - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
