"""Queries and keys rotated in one call, which forms cosines and sines once: nothing else may tell it from two
calls."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_cases import CASES, double, every_case, inputs_of
from strategies import calls, in_memory, random_embeddings, same_bits
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from nd_rotary_encodings import RoPEEncodingND, _routes, apply_rope, apply_rope_qk

ops = torch.ops.nd_rotary


def settings_of(options, pairs):
    """The arguments of the operators that options of ``apply_rope`` stand for."""
    layout = options.get("layout", "interleaved")
    block = {"interleaved": 2, "half": 2 * pairs}.get(layout, layout)
    offset, prefix = (options.get(name, 0) for name in ("rotary_offset", "num_prefix_tokens"))
    return (0, block, offset, prefix, options.get("head_dim_first", False), options.get("inverse", False))


def key_for(call, kind, seed):
    """Keys of the shape of the queries that lie in memory as they do, or otherwise."""
    if kind == "the same":
        return call.x
    key = random_embeddings(call.x.shape, torch.float16 if kind == "dtype" else call.x.dtype, seed)
    if kind == "batch" and call.x.ndim - 2 >= call.positions.ndim - 1:
        return key[None].repeat(2, *[1] * key.ndim)
    return in_memory(key, "contiguous" if kind == "memory" else call.x_memory)


@given(calls(), st.sampled_from(["alike", "the same", "memory", "dtype", "batch"]), st.integers(0, 99))
def test_results_have_the_bits_of_two_calls(call, kind, seed):
    key, settings = key_for(call, kind, seed), settings_of(call.settings, call.freqs.shape[-1])
    together = ops._rotate_qk(call.x, key, call.positions, call.freqs, *settings)
    for y, x in zip(together, (call.x, key), strict=True):
        assert same_bits(y, ops._rotate(x, call.positions, call.freqs, *settings))


@given(calls(), st.sampled_from(["alike", "memory", "dtype"]), st.integers(0, 99))
def test_the_function_gives_the_results_of_two_calls(call, kind, seed):
    key = key_for(call, kind, seed)
    together = apply_rope_qk(call.x, key, call.positions, call.freqs, **call.settings)
    for y, x in zip(together, (call.x, key), strict=True):
        assert same_bits(y, apply_rope(x, call.positions, call.freqs, **call.settings))


@given(calls(dtypes=(torch.float32, torch.float64), broadcast_x=False, special=False), st.integers(0, 99))
def test_gradients_are_those_of_two_calls(call, seed):
    positions = call.positions if call.positions.is_floating_point() else call.positions.double()
    grads = [random_embeddings(call.x.shape, call.x.dtype, seed + i) for i in range(2)]
    outputs = [
        in_memory(random_embeddings(call.x.shape, call.x.dtype, seed + i), "transposed") for i in (2, 3)
    ]
    others = (positions, call.freqs, *settings_of(call.settings, call.freqs.shape[-1]))
    of_query, of_key, *sums = ops._rotate_qk_backward(*grads, *outputs, *others, True, True, True)
    singles = [
        ops._rotate_backward(g, y, *others, True, True, True) for g, y in zip(grads, outputs, strict=True)
    ]
    assert same_bits(of_query, singles[0][0])
    assert same_bits(of_key, singles[1][0])
    largest = max((float(t.abs().max()) for t in (*outputs, positions, call.freqs) if t.numel()), default=0.0)
    terms = sum(float(g.abs().sum()) for g in grads) * max(largest, 1) ** 2
    for together, *of_each in zip(sums, singles[0][1:], singles[1][1:], strict=True):
        # rounded in their own dtype; what is added up may cancel
        eps, eps_of_terms = torch.finfo(together.dtype).eps, torch.finfo(call.x.dtype).eps
        a, b = (t.double() for t in of_each)
        allowed = 2 * eps * (a.abs() + b.abs()) + 4 * eps_of_terms * terms
        assert ((together.double() - a - b).abs() <= allowed).all()


NEEDS = [needs for needs in itertools.product([True, False], repeat=4) if any(needs)]
NEEDS_NAMES = ["+".join(n for n, need in zip("qkpf", s, strict=True) if need) for s in NEEDS]


def both(case, needs):
    (query, positions, freqs), options = inputs_of(case, (needs[0], *needs[2:]))
    settings = settings_of(options, freqs.shape[-1])
    inputs = (query, double(*query.shape, requires_grad=needs[1]), positions, freqs)
    return inputs, lambda *inputs: _routes.rotate_qk(*inputs, settings)


@pytest.mark.parametrize("needs", NEEDS, ids=NEEDS_NAMES)
@pytest.mark.parametrize("name", ["interleaved", "half", "heads first, prefix", "x broadcast, prefix"])
def test_gradcheck_of_some_inputs(name, needs):
    inputs, function = both(CASES[name], needs)
    assert all(y.requires_grad for y in function(*inputs)) == (needs[0] == needs[1] or needs[2] or needs[3])
    outputs = [i for i, y in enumerate(function(*inputs)) if y.requires_grad]
    assert gradcheck(lambda *inputs: [function(*inputs)[i] for i in outputs], inputs)


@every_case
def test_gradients_of_both_orders(case):
    inputs, function = both(case, (True, True, True, True))
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


class Names(TorchDispatchMode):
    """The operators of the package that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "nd_rotary":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def module_and_inputs(dtype=torch.float32):
    query, key = torch.randn(2, 2, 5, 16).to(dtype).requires_grad_()
    return RoPEEncodingND(2, 16, 2), query, torch.rand(2, 5, 2) * 9, key


def test_one_call_each_way():
    module, query, positions, key = module_and_inputs()
    with Names() as seen:
        rotated = module(query, positions, key)
        (rotated[0] * rotated[1]).sum().backward()
    assert seen.names == ["_rotate_qk", "_rotate_qk_backward"]
    with Names() as seen, torch.no_grad():
        module(query, positions, key)
        module(query, positions, key, positions)
        module(query, positions, key, positions.clone())
    assert seen.names == ["_rotate_qk", "_rotate_qk", "_rotate", "_rotate"]


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["query", "key"])
def test_where_one_result_is_used_the_other_takes_no_part(used):
    module, query, positions, key = module_and_inputs(torch.float64)
    module.double()
    inputs = [query.detach().requires_grad_(), key.detach().requires_grad_()]
    result = module(inputs[0], positions, inputs[1])[used.index(True)]
    found = torch.autograd.grad(result.square().sum(), [*inputs, *module.freqs], allow_unused=True)
    alone = module(inputs[used.index(True)], positions)
    expected = torch.autograd.grad(alone.square().sum(), [inputs[used.index(True)], *module.freqs])
    assert found[used.index(False)] is None
    torch.testing.assert_close(found[used.index(True)], expected[0])
    torch.testing.assert_close(found[2], expected[1])


@pytest.mark.parametrize("learned", [True, False])
def test_gradients_that_lie_otherwise(learned):
    module, query, positions, key = module_and_inputs()
    module.requires_grad_(learned)
    grads = torch.randn(2, 5, 16), torch.randn(5, 2, 16).transpose(0, 1)
    leaves = [query, key, *(module.freqs if learned else ())]
    query, key = (t.detach().requires_grad_() for t in (query, key))
    leaves[:2] = query, key
    found = torch.autograd.grad(module(query, positions, key), leaves, grads)
    expected = torch.autograd.grad((module(query, positions), module(key, positions)), leaves, grads)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("kind", ["minus", "zeros"])
def test_a_gradient_that_the_dispatcher_replaces_by_one_with_other_strides(kind, learned):
    module, query, positions, key = module_and_inputs()
    module.requires_grad_(learned)
    query, key = (t.detach().requires_grad_() for t in (query, key))
    leaves = [query, key, *(module.freqs if learned else ())]
    if kind == "minus":
        other = torch.randn(2, 5, 32)[..., ::2]
        lazy = torch._neg_view(torch.randn(2, 5, 32)[..., ::2])
    else:
        other, lazy = torch.randn(2, 5, 16), torch._efficientzerotensor((2, 5, 16))
    grads = lazy, other
    assert lazy.stride() == other.stride()
    found = torch.autograd.grad(module(query, positions, key), leaves, grads)
    expected = torch.autograd.grad((module(query, positions), module(key, positions)), leaves, grads)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_for_dynamic_sizes_with_a_gradient_of_one_image_of_other_strides():
    module, query, positions, key = module_and_inputs()
    compiled = torch.compile(module, backend="aot_eager", dynamic=True)
    query, key = (t[:1].detach().requires_grad_() for t in (query, key))
    leaves = [query, key, *module.freqs]
    grads = torch.randn(1, 5, 16), torch.randn(1, 5, 16).as_strided((1, 5, 16), (7, 16, 1))
    found = torch.autograd.grad(compiled(query, positions[:1], key), leaves, grads)
    expected = torch.autograd.grad(module(query, positions[:1], key), leaves, grads)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_strides_of_dims_of_size_one_may_differ():
    grads, outputs = torch.randn(2, 1, 3, 1, 8), torch.randn(2, 1, 3, 1, 8)
    others = (torch.rand(3, 2), torch.rand(2, 1, 4), 0, 2, 0, 0, False, False, True, True, True)
    expected = ops._rotate_qk_backward(*grads, *outputs, *others)
    grad_key = grads[1].as_strided((1, 3, 1, 8), (5, 8, 3, 1))
    query = outputs[0].as_strided((1, 3, 1, 8), (0, 8, 9, 1))
    found = ops._rotate_qk_backward(grads[0], grad_key, query, outputs[1], *others)
    assert all(map(same_bits, found, expected))


def test_a_key_that_needs_no_gradient_gets_none_from_fixed_frequencies():
    module, query, positions, key = module_and_inputs()
    module.requires_grad_(False)
    rotated = module(query.detach().requires_grad_(), positions, key.detach())
    assert [y.requires_grad for y in rotated] == [True, False]


def test_unlike_tensors_are_refused_by_the_backward_kernel():
    y, other = torch.randn(2, 3, 2, 8), torch.randn(3, 2, 2, 8).transpose(0, 1)
    arguments = (torch.rand(3, 2), torch.rand(2, 2, 4), 0, 2, 0, 0, False, False, True, True, True)
    for grads, outputs in (((y, other), (y, y)), ((y, y), (y, other))):
        with pytest.raises(RuntimeError, match="must lie alike"):
            ops._rotate_qk_backward(*grads, *outputs, *arguments)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_all_tensors_are_checked_before_one_is_rotated_by_the_definition():
    x = torch.randn(3, 2, 8)
    quantized = torch.quantize_per_tensor(x, 0.1, 10, torch.quint8)
    others = torch.rand(3, 2), torch.rand(2, 2, 4), 0, 0  # blocks of 0 channels can't be rotated
    with pytest.raises(RuntimeError, match="not quantized"):
        ops._rotate_qk(x, quantized, *others)
    with pytest.raises(RuntimeError, match="not quantized"):
        ops._rotate_qk_backward(x, quantized, x, x, *others, 0, 0, False, False, True, True, True)


def test_queries_and_keys_of_other_numbers_of_tokens_share_a_position():
    module = RoPEEncodingND(1, 8, 1)
    query, key, position = torch.randn(5, 8), torch.randn(3, 8), torch.tensor([[7.0]])
    rotated = module(query, position, key)
    for y, x in zip(rotated, (query, key), strict=True):
        assert same_bits(y, apply_rope(x[:, None], position, module.freqs[0])[:, 0])
