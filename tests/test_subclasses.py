"""Tensors without values or of other classes: meta, fake, and subclasses that wrap tensors."""

import pytest
import torch
from conftest import leaf
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from nd_rotary_encodings import RoPEEncodingND, apply_rope, apply_rope_, calculate_rope, rotate_embeddings


def test_meta_tensors_have_shapes_gradients_and_no_memory():
    module = RoPEEncodingND(2, 16, 2).to("meta")
    query, positions = (
        torch.empty(4, 5, 16, device="meta", requires_grad=True),
        torch.empty(5, 2, device="meta"),
    )
    rotated = module(query, positions)
    assert rotated.is_meta
    assert rotated.shape == (4, 5, 16)
    rotated.sum().backward()
    assert query.grad.is_meta
    assert query.grad.shape == query.shape
    assert module.freqs[0].grad.shape == (2, 2, 4)


def test_in_place_on_meta_tensors():
    x = torch.empty(5, 2, 8, device="meta")
    assert apply_rope_(x, torch.empty(5, 2, device="meta"), torch.empty(2, 2, 4, device="meta")) is x


def test_fake_tensors_go_through_the_module():
    module = RoPEEncodingND(2, 16, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rotated = module(torch.randn(4, 5, 16), torch.rand(5, 2))
        rotated.sum().backward()
    assert rotated.shape == (4, 5, 16)


def two(tensor):
    return TwoTensor(tensor.clone(), tensor * 2)


@pytest.fixture
def pytorchs_operators_only(monkeypatch):
    """Like DTensor, a subclass has rules for PyTorch's own operators and none for ours."""
    dispatch = TwoTensor.__torch_dispatch__

    def refuse_ours(cls, func, types, args, kwargs):
        if func.namespace == "nd_rotary":
            raise NotImplementedError(f"no rule for {func}")
        return dispatch(func, types, args, kwargs)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(refuse_ours))


@pytest.mark.usefixtures("pytorchs_operators_only")
@pytest.mark.parametrize("which", range(3), ids=["x", "positions", "freqs"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_wrapper_subclasses_are_computed_inside_and_stay_differentiable(layout, which):
    """As distributed and quantized tensors are, in whose place a pair of tensors stands here."""
    inputs = [torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)]
    wrapped = [two(t) if i == which else t for i, t in enumerate(inputs)]
    for tensor in wrapped:
        tensor.requires_grad_()
    y = apply_rope(*wrapped, layout=layout)
    assert isinstance(y, TwoTensor)
    gradients = torch.autograd.grad(y.sin().sum(), wrapped)
    for part, factor in (("a", 1), ("b", 2)):
        plain = [leaf(t * factor if i == which else t) for i, t in enumerate(inputs)]
        expected = apply_rope(*plain, layout=layout)
        torch.testing.assert_close(getattr(y, part).detach(), expected.detach(), rtol=0, atol=1e-5)
        wanted = torch.autograd.grad(expected.sin().sum(), plain)
        torch.testing.assert_close(getattr(gradients[which], part), wanted[which], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("pytorchs_operators_only")
def test_wrapper_subclasses_in_place():
    values, positions, freqs = torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)
    x = two(values)
    assert apply_rope_(x, positions, freqs) is x
    torch.testing.assert_close(x.a, apply_rope(values, positions, freqs), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.b, apply_rope(values * 2, positions, freqs), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("pytorchs_operators_only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wrapper_subclasses_in_place_are_differentiable(dtype):
    values, positions, freqs = (
        torch.randn(3, 2, 8).to(dtype),
        torch.randn(3, 2).to(dtype),
        torch.randn(2, 2, 4).to(dtype),
    )
    x, plain, freqs = two(values).requires_grad_(), leaf(values), leaf(freqs)
    inside = apply_rope_(x * 1, positions, freqs)
    expected = torch.autograd.grad(apply_rope(plain, positions, freqs).sin().sum(), plain)[0]
    actual = torch.autograd.grad(inside.sin().sum(), (x, freqs))[0]
    torch.testing.assert_close(actual.a, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("pytorchs_operators_only")
def test_module_takes_wrapper_subclasses_for_query_and_key():
    module = RoPEEncodingND(2, 16, 2)
    query, key, positions = torch.randn(3, 16), torch.randn(3, 16), torch.rand(3, 2) * 9
    rotated = module(two(query), positions, two(key))
    for pair, plain in zip(rotated, (query, key), strict=True):
        torch.testing.assert_close(pair.a, module(plain, positions), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("pytorchs_operators_only")
def test_module_in_place_takes_wrapper_subclasses():
    module = RoPEEncodingND(2, 16, 2, forward_only=True, inplace=True)
    values, positions = torch.randn(3, 16), torch.rand(3, 2) * 9
    query, key = two(values), two(values)
    assert module(query, positions, key)[0] is query
    expected = module(values.clone(), positions)
    torch.testing.assert_close(query.a, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(key.a, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["calculate_rope", "rotate_embeddings"])
def test_functions_of_given_angles_take_wrapper_subclasses(name):
    function, inputs = {
        "calculate_rope": (calculate_rope, (torch.randn(3, 2), torch.randn(2, 1, 2, 4))),
        "rotate_embeddings": (rotate_embeddings, (torch.randn(3, 2, 8), torch.randn(3, 2, 4))),
    }[name]
    first, second = two(inputs[0]).requires_grad_(), leaf(inputs[1])
    y = function(first, second)
    gradients = torch.autograd.grad(y.sin().sum(), (first, second))
    plain = leaf(inputs[0])
    expected = function(plain, second)
    torch.testing.assert_close(y.a.detach(), expected.detach(), rtol=0, atol=1e-5)
    wanted = torch.autograd.grad(expected.sin().sum(), plain)[0]
    torch.testing.assert_close(gradients[0].a, wanted, rtol=1e-4, atol=1e-4)
