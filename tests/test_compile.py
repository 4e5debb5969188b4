"""torch.compile: results and gradients of eager mode, one graph, no copies, transforms inside."""

import pytest
import torch
from conftest import leaf, shape_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

from nd_rotary_encodings import (
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    reference,
    rotate_embeddings,
)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def results_and_gradients(function, inputs, parameters=()):
    leaves = [leaf(t.clone()) if t.is_floating_point() else t for t in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(
        (r.double() * torch.linspace(1, 2, r.numel(), dtype=torch.float64).view(r.shape)).sum()
        for r in results
    )
    wanted = [t for t in (*leaves, *parameters) if t.requires_grad]
    return [*results, *torch.autograd.grad(loss, wanted)]


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert shape_of(a) == shape_of(b)
        assert torch.equal(a, b)


MODULE = RoPEEncodingND(2, 16, 2, dtype=torch.float64)
MODULE.load_state_dict({"freqs.0": torch.linspace(-1, 2, 16).view(2, 2, 4)}, strict=False)
MODULES = {
    "one group": {},
    "shared heads": {"share_heads": True},
    "closure": {"freq_group_pattern": [[1, 0], [0, 1], [1, 1]], "enforce_freq_groups_equal": False},
    "checkpointing": {"use_checkpointing": True},
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES.keys())
def test_compiled_module_trains_as_eager_bit_for_bit(options, dtype):
    module = RoPEEncodingND(2, 16, 2, **options)
    inputs = torch.randn(2, 5, 16).to(dtype), torch.rand(5, 2) * 9, torch.randn(3, 5, 16).to(dtype)
    expected = results_and_gradients(module, inputs, module.parameters())
    actual = results_and_gradients(compiled(module), inputs, module.parameters())
    assert_same_bits(actual, expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_module_trains_as_eager_bit_for_bit():
    module = RoPEEncodingND(2, 16, 2)
    inputs = torch.randn(2, 5, 48)[..., 16:32], torch.rand(5, 2) * 9, torch.randn(5, 2, 16).transpose(0, 1)
    expected = results_and_gradients(module, inputs, module.parameters())
    actual = results_and_gradients(compiled(module, "inductor"), inputs, module.parameters())
    assert_same_bits(actual, expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("with_key", [False, True], ids=["query", "query and key"])
def test_compiled_module_in_place_writes_the_callers_memory(with_key, backend):
    module = RoPEEncodingND(2, 16, 2, forward_only=True, inplace=True)
    buffers = torch.randn(2, 5, 48), torch.randn(2, 5, 48)
    buffers[1].copy_(buffers[0])
    positions = torch.rand(5, 2) * 9
    for run, buffer in zip((module, compiled(module, backend)), buffers, strict=True):
        query, key = buffer[..., :16], buffer[..., 16:32]
        rotated = run(query, positions, key) if with_key else (run(query, positions),)
        assert rotated[0].data_ptr() == query.data_ptr()
    assert torch.equal(*buffers)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_forward_only_gives_detached_results():
    module = RoPEEncodingND(2, 16, 2, forward_only=True)
    query, positions = torch.randn(5, 16), torch.rand(5, 2) * 9
    rotated = compiled(module)(query, positions)
    assert not rotated.requires_grad
    assert torch.equal(rotated, module(query, positions))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compilation_meets_no_break_where_eager_mode_would_warn():
    normalized = torch.rand(5, 2) * 0.9 + 0.05
    query = torch.randn(5, 16)
    compiled(RoPEEncodingND(2, 16, 2))(query, normalized)
    rotated = compiled(RoPEEncodingND(2, 16, 2, forward_only=True))(leaf(query), normalized * 20)
    assert not rotated.requires_grad


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_copies_no_operand_into_other_strides():
    """Queries and keys are slices of a projection, positions one of boxes, and gradients are transposed."""
    module = RoPEEncodingND(2, 16, 2)
    packed, boxes = torch.randn(2, 5, 48, requires_grad=True), torch.rand(5, 4) * 9

    @torch.compile(fullgraph=True)
    def rotate(packed, boxes):
        query, key, _ = packed.chunk(3, -1)
        return module(query, boxes[:, 1:3], key)

    def transposed_outputs():
        query, key = rotate(packed, boxes)
        weight = torch.randn(5, 2, 16).transpose(0, 1)
        return (query * weight).sum() + (key * weight).sum()

    _, code = run_fw_bw_and_get_code(transposed_outputs)
    forward, backward = (graph[graph.rindex("def call(") :] for graph in code)
    assert forward.count("torch.ops.nd_rotary.apply_rope_qk.default(") == 1
    assert "empty_strided" not in forward
    assert backward.count("torch.ops.nd_rotary._rotate_qk_backward.default(") == 1
    assert backward.count("empty_strided_cpu(") <= 2  # the gradients of the projection and of the frequencies


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", ["module", "function", "in place"])
def test_any_batch_and_number_of_tokens_takes_two_graphs_at_most(kind):
    counter = CompileCounterWithBackend("aot_eager")
    freqs = torch.randn(2, 2, 4)

    def in_place(x, positions):
        return apply_rope_(x.clone().unflatten(-1, (2, 8)), positions, freqs).flatten(-2)

    def function(x, positions):
        rotated = apply_rope(
            x.unflatten(-1, (2, 8)), positions[1:], freqs, layout="half", num_prefix_tokens=1
        )
        return rotated.flatten(-2)

    rotate = {"module": RoPEEncodingND(2, 16, 2), "function": function, "in place": in_place}[kind]
    run = torch.compile(rotate, fullgraph=True, backend=counter)
    for batch, tokens in ((2, 3), (3, 5), (3, 8), (5, 8), (7, 21)):
        query, positions = torch.randn(batch, tokens, 16), torch.rand(tokens, 2) * 9
        assert torch.equal(run(query, positions), rotate(query, positions))
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_any_size_of_a_packed_projection_takes_two_graphs_at_most():
    """What checks whether elements overlap must do so with sizes that are not numbers yet."""
    counter, freqs = CompileCounterWithBackend("aot_eager"), torch.randn(2, 2, 4)

    def rotate(qkv, positions):
        return apply_rope_qkv_(qkv * 2, positions, freqs)

    run = torch.compile(rotate, fullgraph=True, backend=counter)
    for tokens in (3, 5, 8, 13):
        qkv, positions = torch.randn(2, tokens, 3, 2, 8), torch.rand(tokens, 2) * 9
        assert torch.equal(run(qkv, positions), rotate(qkv, positions))
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("layout", ["interleaved", "half", 4])
@pytest.mark.parametrize("kind", ["out of place", "in place", "packed"])
def test_compiled_functions_have_the_bits_of_eager_mode(kind, layout, prefix):
    shape = (2, 5, 3, 2, 8) if kind == "packed" else (2, 5, 2, 8)
    inputs = torch.randn(shape), torch.randn(5 - prefix, 2), torch.randn(2, 2, 4)

    def rotate(x, positions, freqs):
        if kind == "out of place":
            return apply_rope(x, positions, freqs, layout=layout, num_prefix_tokens=prefix)
        function = apply_rope_qkv_ if kind == "packed" else apply_rope_
        return function(x * 2, positions, freqs, layout=layout, num_prefix_tokens=prefix)

    assert_same_bits(results_and_gradients(compiled(rotate), inputs), results_and_gradients(rotate, inputs))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("embeddings_need_grad", [True, False])
@pytest.mark.parametrize("used", ["result", "input"])
@pytest.mark.parametrize("function", [apply_rope_, apply_rope_qkv_])
def test_rotation_in_place_of_an_input_of_the_graph_has_its_gradients(function, used, embeddings_need_grad):
    shape = (2, 5, 3, 2, 8) if function is apply_rope_qkv_ else (2, 5, 2, 8)
    inputs = torch.randn(shape), torch.randn(5, 2), torch.randn(2, 2, 4)

    def results(rotate):
        x, positions, freqs = map(leaf, inputs)
        rotated = x * 2 if embeddings_need_grad else x.detach() * 2
        result = rotate(rotated, positions, freqs)
        end = (result if used == "result" else rotated).pow(3).sum()
        leaves = [x, positions, freqs] if embeddings_need_grad else [positions, freqs]
        return [end.detach(), *torch.autograd.grad(end, leaves)]

    assert_same_bits(results(compiled(function)), results(function))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_gradients_of_a_packed_projection_are_right_where_it_is_changed_later():
    """Eager mode refuses it; a compiler sees only values."""
    inputs = torch.randn(5, 3, 2, 8), torch.randn(5, 2), torch.randn(2, 2, 4)

    def packed(qkv, positions, freqs):
        return apply_rope_qkv_(qkv * 2, positions, freqs).mul_(3)

    def parts(qkv, positions, freqs):
        q, k, v = (qkv * 2).unbind(1)
        rotated = [apply_rope(x, positions, freqs) for x in (q, k)]
        return torch.stack([*rotated, v], 1) * 3

    results = [results_and_gradients(f, inputs) for f in (compiled(packed), parts)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_attention_with_a_packed_projection_is_eager_attention():
    torch.manual_seed(0)
    project = nn.Linear(16, 48)
    freqs = nn.Parameter(torch.randn(2, 1, 4))
    tokens, positions = torch.randn(2, 5, 16), torch.rand(5, 2) * 9

    def attend(tokens):
        qkv = apply_rope_qkv_(project(tokens).view(2, 5, 3, 2, 8), positions, freqs, layout="half")
        return nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))

    parameters = [*project.parameters(), freqs]
    expected = results_and_gradients(attend, [tokens], parameters)
    actual = results_and_gradients(compiled(attend, "inductor"), [tokens], parameters)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_functions_of_given_angles_have_the_bits_of_eager_mode():
    def rotate(x, positions, freqs):
        return rotate_embeddings(x, calculate_rope(positions, freqs)).flatten(-2)

    inputs = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2), torch.randn(2, 3, 2, 4)
    assert_same_bits(results_and_gradients(compiled(rotate), inputs), results_and_gradients(rotate, inputs))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_rotation_by_angles_in_place():
    x, angles = torch.randn(5, 2, 8), torch.randn(5, 2, 4)
    expected = rotate_embeddings(x, angles)
    rotated = compiled(lambda x: rotate_embeddings(x, angles, needs_autograd=False))(x)
    assert torch.equal(x, expected)
    assert torch.equal(rotated, expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_errors_while_compiling_name_the_argument():
    with pytest.raises(Exception, match="Expected freqs to have as many heads as x"):
        compiled(apply_rope)(torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(2, 3, 4))


def transforms_of_a_module():
    module = RoPEEncodingND(2, 16, 2, dtype=torch.float64)
    query, positions = torch.randn(4, 5, 16).double(), torch.rand(4, 5, 2).double() * 9
    parameters = {key: value.detach() for key, value in module.named_parameters()}
    return {
        "grad": lambda: grad(lambda q, p: module(q, p).sin().sum(), argnums=(0, 1))(query, positions),
        "jacrev": lambda: jacrev(lambda p: module(query[0], p).sin().sum(-1))(positions[0]),
        "vmap": lambda: vmap(module)(query, positions),
        "per sample": lambda: vmap(
            grad(lambda w, q, p: functional_call(module, w, (q, p)).sin().sum()), (None, 0, 0)
        )(parameters, query, positions)["freqs.0"],
    }


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["vmap", "grad", "jacrev", "per sample"])
def test_compiled_transforms_are_eager_transforms(name):
    transform = transforms_of_a_module()[name]
    expected = transform()
    torch.testing.assert_close(compiled(transform)(), expected, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (apply_rope, [(3, 2, 8), (3, 2), (2, 2, 4)]),
        (rotate_embeddings, [(3, 2, 8), (3, 2, 4)]),
        (calculate_rope, [(3, 2), (2, 1, 2, 4)]),
        (MODULE, [(3, 16), (3, 2)]),
    ],
    ids=["apply_rope", "rotate_embeddings", "calculate_rope", "module"],
)
def test_compiled_forward_mode_is_right_or_an_error_but_never_zero(function, shapes):
    inputs = [torch.randn(*shape).double() * 3 for shape in shapes]
    tangents = [torch.randn(*shape).double() for shape in shapes]
    # by reverse mode twice
    expected = torch.autograd.functional.jvp(function, tuple(inputs), tuple(tangents))[1]
    try:
        actual = compiled(lambda *args: jvp(function, args, tuple(tangents))[1])(*inputs)
    except Exception:
        return
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dual_numbers_in_compiled_code_are_right_or_an_error_but_never_zero(backend):
    inputs = torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)
    tangent = torch.randn(3, 2, 8)
    run = torch.compile(apply_rope, backend=backend)
    with forward_ad.dual_level():
        try:
            actual = forward_ad.unpack_dual(
                run(forward_ad.make_dual(inputs[0], tangent), *inputs[1:])
            ).tangent
        except Exception:
            return
        assert actual is not None
        # linear in x
        torch.testing.assert_close(actual, reference.apply_rope(tangent, *inputs[1:]), rtol=0, atol=1e-5)
