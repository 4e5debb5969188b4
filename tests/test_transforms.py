"""Forward mode and torch.func: tangents, Jacobians, vmap, and all of it nested."""

import itertools
from functools import partial

import pytest
import torch
from small_cases import double, every_case, every_qkv_case, every_subset, in_place_of, inputs_of
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import nd_rotary_encodings as nd
from nd_rotary_encodings import RoPEEncodingND, apply_rope, apply_rope_, apply_rope_qkv_, reference


def central_difference(function, inputs, tangents, step=1e-6):
    ahead, behind = (
        function(*(x + sign * step * t for x, t in zip(inputs, tangents, strict=True))) for sign in (1, -1)
    )
    return (ahead - behind) / (2 * step)


# ---- forward mode


def tangent_of(function, inputs, tangents):
    with forward_ad.dual_level():
        duals = [
            x.detach() if t is None else forward_ad.make_dual(x.detach(), t)
            for x, t in zip(inputs, tangents, strict=True)
        ]
        return forward_ad.unpack_dual(function(*duals)).tangent


@every_case
def test_forward_mode_gradcheck(case):
    inputs, options = inputs_of(case)
    function = lambda *args: apply_rope(*args, **options)  # noqa: E731
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@every_qkv_case
def test_forward_mode_gradcheck_in_place(case):
    inputs, options = inputs_of(case)
    assert gradcheck(
        lambda *args: in_place_of(apply_rope_qkv_)(*args, **options), inputs, check_forward_ad=True
    )


MODULE = RoPEEncodingND(2, 8, 2, dtype=torch.float64)
MODULE.load_state_dict({"freqs.0": torch.linspace(-1, 2, 8).view(2, 2, 2)}, strict=False)


# name: function and shapes of its differentiable arguments
FUNCTIONS = {
    "apply_rope": (apply_rope, [(3, 2, 4), (3, 2), (2, 2, 2)]),
    "apply_rope, half": (lambda *args: apply_rope(*args, layout="half"), [(3, 2, 4), (3, 2), (2, 2, 2)]),
    "apply_rope_": (in_place_of(apply_rope_), [(3, 2, 4), (3, 2), (2, 2, 2)]),
    "apply_rope_qkv_": (in_place_of(apply_rope_qkv_), [(3, 3, 2, 4), (3, 2), (2, 2, 2)]),
    "module": (MODULE, [(3, 8), (3, 2)]),
    "module, key": (lambda *args: torch.cat(MODULE(*args)), [(3, 8), (3, 2), (3, 8)]),
    "end to end": (MODULE.apply_rope_endtoend, [(3, 2, 4), (3, 2), (2, 1, 2, 2)]),
}
OTHER_FUNCTIONS = {
    "calculate_rope": (nd.calculate_rope, [(3, 2), (2, 2, 2, 2)]),
    "rotate_embeddings": (nd.rotate_embeddings, [(3, 2, 4), (3, 2, 2)]),
    "rotate_embeddings_backward, embeddings": (
        lambda *args: nd.rotate_embeddings_backward(*args)[0],
        [(3, 2, 4), (3, 2, 4), (3, 2, 2)],
    ),
    "rotate_embeddings_backward, angles": (
        lambda *args: nd.rotate_embeddings_backward(*args)[1],
        [(3, 2, 4), (3, 2, 4), (3, 2, 2)],
    ),
    "calculate_rope_backward, positions": (
        lambda *args: nd.calculate_rope_backward(*args, True, True)[0],
        [(3, 2, 2), (3, 2), (2, 1, 2, 2)],
    ),
    "calculate_rope_backward, freqs": (
        lambda *args: nd.calculate_rope_backward(*args, True, True)[1],
        [(3, 2, 2), (3, 2), (2, 1, 2, 2)],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents_are_central_differences(name):
    function, shapes = FUNCTIONS[name]
    inputs = [double(*shape) * 3 for shape in shapes]
    tangents = [double(*shape) for shape in shapes]
    expected = central_difference(function, inputs, tangents).detach()
    for transformed in (
        tangent_of(function, inputs, tangents),
        jvp(function, tuple(inputs), tuple(tangents))[1],
    ):
        torch.testing.assert_close(transformed.detach(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_input_alone_sends_its_tangent_on(name):
    function, shapes = FUNCTIONS[name]
    inputs = [double(*shape) * 3 for shape in shapes]
    for index, shape in enumerate(shapes):
        tangents = [double(*shape) if i == index else None for i in range(len(shapes))]
        zeros = [torch.zeros_like(x) if t is None else t for x, t in zip(inputs, tangents, strict=True)]
        expected = central_difference(function, inputs, zeros).detach()
        actual = tangent_of(function, inputs, tangents)
        torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("mode", ["dual numbers", "torch.func.jvp"])
@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_forward_mode_is_right_or_an_error_but_never_zero(name, mode):
    function, shapes = OTHER_FUNCTIONS[name]
    inputs = [double(*shape) for shape in shapes]
    tangents = [double(*shape) for shape in shapes]
    try:
        if mode == "dual numbers":
            actual = tangent_of(function, inputs, tangents)
        else:
            actual = jvp(function, tuple(inputs), tuple(tangents))[1]
    except (NotImplementedError, RuntimeError):
        return
    assert actual is not None
    torch.testing.assert_close(actual, central_difference(function, inputs, tangents), rtol=0, atol=1e-7)


def test_forward_mode_over_frequencies_of_the_module():
    module = RoPEEncodingND(2, 8, 2, freq_group_pattern=[[1, 0], [0, 1]]).double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    query, positions = double(3, 8), double(3, 2) * 3

    def rotate(*values):
        return functional_call(module, dict(zip(parameters, values, strict=True)), (query, positions))

    expected = central_difference(rotate, list(parameters.values()), list(tangents.values()))
    actual = jvp(rotate, tuple(parameters.values()), tuple(tangents.values()))[1]
    torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=1e-7)


# ---- torch.func


def scalar(*args):
    return (apply_rope(*args) * torch.linspace(0.5, 2, 24, dtype=torch.float64).view(3, 2, 4)).sin().sum()


def three_inputs():
    return double(3, 2, 4), double(3, 2), double(2, 2, 2)


def test_func_grad_is_autograd_grad():
    inputs = three_inputs()
    actual = grad(scalar, argnums=(0, 1, 2))(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    for a, b in zip(actual, torch.autograd.grad(scalar(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_vjp_is_autograd_grad():
    inputs, g = three_inputs(), double(3, 2, 4)
    y, pull_back = vjp(apply_rope, *inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    eager = apply_rope(*leaves)
    torch.testing.assert_close(y, eager.detach(), rtol=0, atol=1e-12)
    for a, b in zip(pull_back(g), torch.autograd.grad(eager, leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians_are_those_of_eager_mode(transform):
    inputs = three_inputs()
    actual = transform(apply_rope, argnums=(0, 1, 2))(*inputs)
    expected = torch.autograd.functional.jacobian(apply_rope, inputs)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_hessian_is_that_of_eager_mode():
    inputs = three_inputs()
    actual = hessian(scalar, argnums=(0, 1, 2))(*inputs)
    expected = torch.autograd.functional.hessian(scalar, inputs)
    for row, expected_row in zip(actual, expected, strict=True):
        for a, b in zip(row, expected_row, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@every_subset
@pytest.mark.parametrize(
    "transforms",
    [t for order in (2, 3) for t in itertools.product([jacfwd, jacrev], repeat=order)],
    ids=lambda transforms: " of ".join(t.__name__ for t in transforms),
)
def test_higher_derivatives_are_the_same_in_any_order_of_modes(transforms, needs):
    inputs = three_inputs()

    def along(function, s):
        return function(*(t * s if need else t for t, need in zip(inputs, needs, strict=True))).sin().sum()

    derivative, s = partial(along, apply_rope), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    expected = along(reference.apply_rope, s)
    for transform in reversed(transforms):
        derivative = transform(derivative)
        (expected,) = torch.autograd.grad(expected, s, create_graph=True)
    torch.testing.assert_close(derivative(s.detach()), expected.detach(), rtol=1e-10, atol=1e-10)


IN_DIMS = [
    dims for dims in itertools.product([0, None], [0, None], [0, None]) if dims != (None, None, None)
] + [(1, 0, None), (-1, 1, -1), (3, None, 2)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("options", [{}, {"layout": "half", "inverse": True}], ids=["interleaved", "half"])
def test_vmap_is_a_loop(in_dims, options):
    shapes = [(3, 2, 4), (3, 2), (2, 2, 2)]
    inputs = []
    for shape, dim in zip(shapes, in_dims, strict=True):
        x = double(*shape) if dim is None else double(5, *shape).movedim(0, dim)
        inputs.append(x)

    def rotate(*args):
        return apply_rope(*args, **options)

    actual = vmap(rotate, in_dims)(*inputs)
    rows = [
        rotate(*(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True)))
        for i in range(5)
    ]
    torch.testing.assert_close(actual, torch.stack(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(3, 2, 4), (6, 3, 2), (2, 2, 2)], {}),
        ([(6, 3, 2, 4), (2,), (2, 2, 2)], {}),
        ([(2, 3, 4), (6, 3, 2), (2, 1, 1)], {"head_dim_first": True, "rotary_offset": 1}),
        ([(5, 2, 4), (6, 3, 2), (2, 1, 2)], {"num_prefix_tokens": 2}),
        ([(6, 2, 5, 4), (3, 2), (2, 1, 2)], {"num_prefix_tokens": 2, "head_dim_first": True}),
    ],
    ids=["x with fewer dims", "positions with fewer", "heads first", "prefix", "prefix, heads first"],
)
@pytest.mark.parametrize("in_dims", IN_DIMS[:7], ids=str)
def test_vmap_keeps_the_dims_of_an_entry_aligned(in_dims, shapes, options):
    inputs = [
        double(*shape) if dim is None else double(4, *shape)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    actual = vmap(lambda *args: apply_rope(*args, **options), in_dims)(*inputs)
    for i in range(4):
        entry = (x if dim is None else x[i] for x, dim in zip(inputs, in_dims, strict=True))
        expected = apply_rope(*entry, **options)
        torch.testing.assert_close(actual[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("in_dims", IN_DIMS[:7], ids=str)
def test_vmap_of_an_empty_batch(in_dims):
    shapes = [(3, 2, 4), (3, 2), (2, 2, 2)]
    inputs = [
        double(*shape) if dim is None else double(0, *shape)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    assert vmap(apply_rope, in_dims)(*inputs).shape == (0, 3, 2, 4)
    gradients = vmap(grad(scalar, argnums=(0, 1, 2)), in_dims)(*inputs)
    assert [g.shape for g in gradients] == [(0, *shape) for shape in shapes]


def test_transforms_have_the_bits_of_eager_mode():
    """They use the kernels; plain PyTorch would round elsewhere."""
    x, positions, freqs = torch.randn(5, 30, 2, 16), torch.randn(5, 30, 2) * 9, torch.randn(2, 2, 8)
    g = torch.randn(5, 30, 2, 16)
    leaves = [t.clone().requires_grad_() for t in (x, positions, freqs)]
    y = apply_rope(*leaves)
    y.backward(g)
    assert torch.equal(vmap(apply_rope, (0, 0, None))(x, positions, freqs), y)
    primal, pull_back = vjp(apply_rope, x, positions, freqs)
    assert torch.equal(primal, y)
    for actual, leaf in zip(pull_back(g), leaves, strict=True):
        assert torch.equal(actual, leaf.grad)
    primal, tangent = jvp(lambda x: apply_rope(x, positions, freqs), (x,), (g,))
    assert torch.equal(primal, y)
    assert torch.equal(tangent, apply_rope(g, positions, freqs))


def test_nested_vmap():
    x, positions, freqs = double(4, 5, 3, 2, 4), double(5, 3, 2), double(4, 2, 2, 2)
    actual = vmap(vmap(apply_rope, (0, 0, None)), (0, None, 0))(x, positions, freqs)
    rows = [torch.stack([apply_rope(x[i, j], positions[j], freqs[i]) for j in range(5)]) for i in range(4)]
    torch.testing.assert_close(actual, torch.stack(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vmap_keeps_the_dtype_and_the_accuracy_of_angles(dtype):
    """Up to angles where float32 products have lost the fraction of a turn."""
    x, positions = torch.randn(5, 3, 1, 8).to(dtype), torch.rand(5, 3, 1) * 1e5
    freqs = torch.rand(1, 1, 4)
    actual = vmap(apply_rope, (0, 0, None))(x, positions, freqs)
    assert actual.dtype == dtype
    exact = apply_rope(x.double(), positions.double(), freqs.double())
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("with_key", [False, True], ids=["query", "query and key"])
@pytest.mark.parametrize(
    "options", [{}, {"forward_only": True}, {"forward_only": True, "inplace": True}], ids=str
)
def test_vmap_of_the_module_is_a_loop(options, with_key):
    module = RoPEEncodingND(2, 8, 2, **options)
    inputs = [torch.randn(5, 3, 8), torch.rand(5, 3, 2) * 9, torch.randn(5, 3, 8)][: 2 + with_key]
    rows = [module(*(x[i].clone() for x in inputs)) for i in range(5)]
    if with_key:
        rows = [torch.cat(row) for row in rows]
    with torch.no_grad():
        actual = vmap(module)(*inputs)
    if with_key:
        actual = torch.cat(actual, 1)
    torch.testing.assert_close(actual, torch.stack(rows).detach(), rtol=0, atol=1e-6)


def test_per_sample_gradients_of_the_module():
    module = RoPEEncodingND(2, 8, 2, freq_group_pattern=[[1, 1], [0, 1]], dtype=torch.float64)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    query, positions = double(5, 3, 8), double(5, 3, 2) * 3

    def loss(parameters, query, positions):
        return functional_call(module, parameters, (query, positions)).sin().sum()

    actual = vmap(grad(loss), (None, 0, 0))(parameters, query, positions)
    for i in range(5):
        expected = torch.autograd.grad(module(query[i], positions[i]).sin().sum(), list(module.parameters()))
        for (name, _), e in zip(module.named_parameters(), expected, strict=True):
            torch.testing.assert_close(actual[name][i], e, rtol=0, atol=1e-11)


def test_hessian_vector_product_forward_over_reverse():
    inputs, tangents = three_inputs(), three_inputs()
    _, actual = jvp(grad(scalar, argnums=(0, 1, 2)), inputs, tangents)
    _, expected = torch.autograd.functional.vhp(scalar, inputs, tangents)  # symmetric
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_func_grad_through_rotation_in_place():
    inputs = three_inputs()

    def in_place(*args):
        return in_place_of(apply_rope_)(*args).sin().sum()

    actual = grad(in_place, argnums=(0, 1, 2))(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(apply_rope(*leaves).sin().sum(), leaves)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["calculate_rope", "rotate_embeddings"])
def test_functions_of_given_angles_under_torch_func(name):
    function, shapes = OTHER_FUNCTIONS[name]
    inputs = [double(*shape) for shape in shapes]
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    actual = grad(lambda *args: function(*args).sin().sum(), argnums=(0, 1))(*inputs)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    batched = vmap(function, (0, None))(torch.stack([inputs[0], 2 * inputs[0]]), inputs[1])
    torch.testing.assert_close(batched[1], function(2 * inputs[0], inputs[1]), rtol=0, atol=1e-12)
