"""torch.ops.nd_rotary: opcheck, fake kernels, compile, export, subclasses, errors in C, TorchScript."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_fw_bw_and_get_code
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.library import opcheck
from torch.testing._internal.two_tensor import TwoTensor

from nd_rotary_encodings import (
    _C,
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    calculate_rope_backward,
    reference,
    rotate_embeddings,
    rotate_embeddings_backward,
)

ops = torch.ops.nd_rotary
SETTINGS = (
    0,
    2,
    0,
    0,
    False,
    False,
)  # heads, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse


def leaf(tensor):
    return tensor.detach().requires_grad_()


def strided(*shape):
    """Every other channel of a wider tensor, whose first two dims are swapped in memory."""
    *lead, channels = shape
    wide = torch.randn(*reversed(lead[:2]), *lead[2:], 2 * channels)[..., ::2]
    return wide.transpose(0, 1) if len(lead) > 1 else wide


# ---- opcheck

ROTATE = {
    "plain": lambda: (torch.randn(2, 3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)),
    "strides": lambda: (strided(2, 3, 2, 8), strided(3, 2), strided(2, 2, 4)),
    "expanded": lambda: (
        torch.randn(1, 3, 2, 8).expand(2, 3, 2, 8),
        torch.randn(1, 2).expand(3, 2),
        torch.randn(2, 1, 4).expand(2, 2, 4),
    ),
    "x broadcast": lambda: (torch.randn(1, 3, 2, 8), torch.randn(4, 3, 2), torch.randn(2, 1, 4)),
    "heads in the last dim": lambda: (torch.randn(2, 3, 16), torch.randn(3, 2), torch.randn(2, 2, 4), 2),
    "half, heads first, prefix, inverse": lambda: (
        torch.randn(2, 2, 4, 8),
        torch.randn(3, 2),
        torch.randn(2, 1, 2),
        0,
        4,
        1,
        1,
        True,
        True,
    ),
    "bfloat16 and float64": lambda: (
        torch.randn(3, 2, 8).bfloat16(),
        torch.randn(3, 2).double(),
        torch.randn(2, 2, 4).half(),
    ),
    "integer positions": lambda: (torch.randn(3, 2, 8), torch.arange(6).view(3, 2), torch.randn(2, 2, 4)),
    "no tokens": lambda: (torch.randn(0, 3, 2, 8), torch.randn(3, 2), torch.randn(2, 2, 4)),
    "no leading dims": lambda: (torch.randn(2, 8), torch.randn(2), torch.randn(2, 2, 4)),
}
every_rotation = pytest.mark.parametrize("arguments", ROTATE.values(), ids=ROTATE.keys())
BY_ANGLES = {
    "plain": lambda: (torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 4)),
    "strides": lambda: (strided(2, 3, 2, 8), strided(2, 3, 2, 4)),
    "shared heads": lambda: (torch.randn(2, 3, 2, 8), torch.randn(1, 3, 1, 4)),
    "x broadcast": lambda: (torch.randn(1, 3, 2, 8), torch.randn(2, 1, 2, 4)),
    "float16 and float64": lambda: (torch.randn(3, 2, 8).half(), torch.randn(3, 2, 4).double()),
    "no tokens": lambda: (torch.randn(0, 2, 8), torch.randn(1, 2, 4)),
}
every_rotation_by_angles = pytest.mark.parametrize("arguments", BY_ANGLES.values(), ids=BY_ANGLES.keys())
ANGLES = {
    "plain": lambda: (torch.randn(2, 3, 2), torch.randn(2, 1, 2, 4)),
    "groups": lambda: (torch.randn(3, 2), torch.randn(2, 3, 1, 4)),
    "strides": lambda: (strided(2, 3, 2), strided(2, 3, 2, 4)),
    "integer positions": lambda: (torch.arange(6).view(3, 2), torch.randn(2, 1, 2, 4).half()),
    "no tokens": lambda: (torch.randn(0, 2), torch.randn(2, 1, 2, 4)),
}
every_angle = pytest.mark.parametrize("arguments", ANGLES.values(), ids=ANGLES.keys())


def with_grad(arguments):
    return tuple(leaf(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)


@every_rotation
def test_opcheck_of_apply_rope(arguments):
    opcheck(ops.apply_rope.default, with_grad(arguments()))


@every_rotation_by_angles
def test_opcheck_of_rotate_embeddings(arguments):
    opcheck(ops.rotate_embeddings.default, with_grad(arguments()))


@every_angle
def test_opcheck_of_calculate_rope(arguments):
    opcheck(ops.calculate_rope.default, with_grad(arguments()))


def opcheck_raw(op, arguments, everything):
    """Raw operators know no autograd; dispatching them once in each way is enough."""
    utils = ("test_schema", "test_faketensor", *(["test_aot_dispatch_dynamic"] if everything else []))
    opcheck(op, arguments, test_utils=utils)


@pytest.mark.parametrize("name", ROTATE)
def test_opcheck_of_the_raw_rotations(name):
    arguments, everything = ROTATE[name](), name == "half, heads first, prefix, inverse"
    opcheck_raw(ops._rotate.default, arguments, everything)
    y = ops._rotate(*arguments)
    opcheck_raw(ops._rotate_.default, (y.clone(), *arguments[1:]), everything)
    settings = (*arguments[3:], *SETTINGS[len(arguments) - 3 :])
    for needs in ((True, arguments[1].is_floating_point(), True), (False, False, True), (True, False, False)):
        backward = (torch.randn_like(y), y, *arguments[1:3], *settings, *needs)
        opcheck_raw(ops._rotate_backward.default, backward, everything)


@pytest.mark.parametrize("name", BY_ANGLES)
def test_opcheck_of_the_raw_rotations_by_angles(name):
    (x, angles), everything = BY_ANGLES[name](), name == "strides"
    opcheck_raw(ops._rotate_by_angles.default, (x, angles), everything)
    full = ops._rotate_by_angles(x, angles)
    opcheck_raw(ops._rotate_by_angles_.default, (full.clone(), angles), everything)
    for needs in ((True, True), (True, False), (False, True)):
        backward = (torch.randn_like(full), full, angles, *needs)
        opcheck_raw(ops._rotate_by_angles_backward.default, backward, everything)


@pytest.mark.parametrize("name", ANGLES)
def test_opcheck_of_the_raw_angles(name):
    opcheck_raw(ops._calculate_angles.default, ANGLES[name](), name == "strides")


def test_operators_say_that_they_take_any_strides():
    """Else Inductor copies tensors into the strides that it traced."""
    public = (ops.apply_rope, ops.rotate_embeddings, ops.calculate_rope)
    rotations = (ops._rotate, ops._rotate_, ops._rotate_backward)
    by_angles = (ops._rotate_by_angles, ops._rotate_by_angles_, ops._rotate_by_angles_backward)
    for op in (*public, *rotations, *by_angles, ops._calculate_angles):
        assert torch.Tag.flexible_layout in op.default.tags


# ---- fake kernels and definitions against the kernels in C


def shape_of(tensor):
    """Shape, strides where they mean something, dtype."""
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), steps if tensor.numel() else [], tensor.dtype


def embeddings_in_many_layouts():
    """`[2, 3, 2, 4]` and broadcast relatives: dense in all orders of dims, and not dense."""
    for order in itertools.permutations(range(4)):
        x = torch.randn([(2, 3, 2, 4)[d] for d in order])
        yield x.permute([order.index(d) for d in range(4)])
    yield torch.randn(2, 3, 2, 8)[..., :4]
    yield torch.randn(2, 3, 1, 4).expand(2, 3, 2, 4)
    yield torch.randn(1, 3, 2, 4)
    yield torch.randn(2, 1, 2, 4).transpose(0, 1)


FORWARD_CALLS = {
    **{f"rotation, {name}": (ops._rotate, arguments) for name, arguments in ROTATE.items()},
    **{f"by angles, {name}": (ops._rotate_by_angles, arguments) for name, arguments in BY_ANGLES.items()},
    **{f"angles, {name}": (ops._calculate_angles, arguments) for name, arguments in ANGLES.items()},
}
every_forward = pytest.mark.parametrize(("op", "arguments"), FORWARD_CALLS.values(), ids=FORWARD_CALLS.keys())


@every_forward
def test_fake_kernel_has_the_shape_strides_and_dtype_of_the_real_one(op, arguments):
    arguments = arguments()
    mode = FakeTensorMode()
    with mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        fake = op(*fakes)
    assert shape_of(fake) == shape_of(op(*arguments))
    on_meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    assert on_meta.is_meta
    assert on_meta.shape == fake.shape


@pytest.mark.parametrize(
    ("heads", "head_dim_first"),
    [(False, False), (False, True), (True, False)],
    ids=["tokens first", "heads first", "heads in the last dim"],
)
def test_fake_kernel_has_the_strides_of_the_real_one_for_any_order_of_dims(heads, head_dim_first):
    for x in embeddings_in_many_layouts():
        n_heads = x.shape[-3 if head_dim_first else -2]
        tokens = x.shape[-2 if head_dim_first else -3]
        positions, freqs = torch.randn(tokens, 2), torch.randn(2, n_heads, x.shape[-1] // 2)
        count = 0
        if heads:
            x, count = x[..., 0, :], 2
            positions, freqs = torch.randn(x.shape[-2], 2), torch.randn(2, 1, x.shape[-1] // 4)
        settings = (count, 2, 0, 0, head_dim_first, False)
        mode = FakeTensorMode()
        with mode:
            fake = ops._rotate(*(mode.from_tensor(t) for t in (x, positions, freqs)), *settings)
        y = ops._rotate(x, positions, freqs, *settings)
        assert shape_of(fake) == shape_of(y)
        gradient = torch.randn(y.shape)
        real = ops._rotate_backward(gradient, y, positions, freqs, *settings, True, True, True)
        with mode:
            fakes = ops._rotate_backward(
                *(mode.from_tensor(t) for t in (gradient, y, positions, freqs)), *settings, True, True, True
            )
        assert [shape_of(t) for t in fakes] == [shape_of(t) for t in real]


def definition(op):
    """What runs on a device without a kernel, here on CPU tensors."""
    return lambda *arguments: op.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


@every_forward
def test_definition_for_other_devices_has_the_values_and_strides_of_the_kernel(op, arguments):
    arguments = arguments()
    if op is ops._rotate:
        arguments = (*arguments, *SETTINGS[len(arguments) - 3 :])
    actual, expected = definition(op)(*arguments), op(*arguments)
    assert shape_of(actual) == shape_of(expected)
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@every_rotation
def test_definition_in_place_and_backward_have_the_values_of_the_kernel(arguments):
    arguments = arguments()
    arguments = (*arguments, *SETTINGS[len(arguments) - 3 :])
    y = ops._rotate(*arguments)
    tolerance = 4 * torch.finfo(y.dtype).eps
    by_definition, by_kernel = y.clone(), y.clone()
    assert definition(ops._rotate_)(by_definition, *arguments[1:]) is None
    ops._rotate_(by_kernel, *arguments[1:])
    torch.testing.assert_close(by_definition, by_kernel, rtol=tolerance, atol=tolerance)
    needs = (True, arguments[1].is_floating_point(), True)
    backward = (torch.randn(y.shape).to(y.dtype), y, *arguments[1:], *needs)
    results = definition(ops._rotate_backward)(*backward), ops._rotate_backward(*backward)
    for a, b in zip(*results, strict=True):
        assert shape_of(a) == shape_of(b)
        torch.testing.assert_close(
            a, b, rtol=1e-3 if b.dtype == torch.float16 else 2e-2 * tolerance + 1e-5, atol=1e-4
        )


@every_rotation_by_angles
def test_definition_by_angles_in_place_and_backward_have_the_values_of_the_kernel(arguments):
    x, angles = arguments()
    x = ops._rotate_by_angles(x, angles)
    tolerance = 4 * torch.finfo(x.dtype).eps
    by_definition, by_kernel = x.clone(), x.clone()
    assert definition(ops._rotate_by_angles_)(by_definition, angles) is None
    ops._rotate_by_angles_(by_kernel, angles)
    torch.testing.assert_close(by_definition, by_kernel, rtol=tolerance, atol=tolerance)
    gradient = torch.randn(x.shape).to(x.dtype)
    results = (
        run(gradient, x, angles, True, True)
        for run in (definition(ops._rotate_by_angles_backward), ops._rotate_by_angles_backward)
    )
    for a, b in zip(*results, strict=True):
        assert shape_of(a) == shape_of(b)
        torch.testing.assert_close(a, b, rtol=1e-3 if x.dtype == torch.float16 else 1e-5, atol=1e-4)


# ---- torch.compile


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
    assert forward.count("torch.ops.nd_rotary.apply_rope.default(") == 2
    assert "empty_strided" not in forward
    assert backward.count("torch.ops.nd_rotary._rotate_backward.default(") == 2
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


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES.keys())
def test_exported_module_is_the_module(options):
    module = RoPEEncodingND(2, 16, 2, **options)
    tokens = torch.export.Dim("tokens", min=2)
    query, positions = torch.randn(2, 5, 16), torch.rand(5, 2) * 9
    program = torch.export.export(
        module, (query, positions), dynamic_shapes={"query": {1: tokens}, "query_pos": {0: tokens}}
    )
    query, positions = torch.randn(2, 9, 16), torch.rand(9, 2) * 9
    assert torch.equal(program.module()(query, positions), module(query, positions))


# ---- meta tensors and subclasses


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


# ---- errors in C: what Python checks first is checked again before memory is touched


def x(*shape):
    return torch.zeros(shape or (2, 3, 2, 8))


P, F, A = torch.ones(3, 2), torch.ones(2, 2, 4), torch.ones(2, 3, 2, 4)
F4 = F[:, None]
ONES_15, ONES_16 = (1,) * 15, (1,) * 16
NEEDS = (True, True, True)

ROTATION_ERRORS = {
    "embeddings of one dim": ((x(8), P, F), "need the dims of heads and channels"),
    "embeddings of no dim": ((x(1)[0], P, F), "need the dims of heads and channels"),
    "integer embeddings": ((x().int(), P, F), "must be float16, bfloat16, float32 or float64"),
    "bool embeddings": ((x().bool(), P, F), "must be float16, bfloat16, float32 or float64"),
    "complex embeddings": ((x().cfloat(), P, F), "must be float16, bfloat16, float32 or float64"),
    "float8 embeddings": ((x().to(torch.float8_e5m2), P, F), "must be float16, bfloat16, float32 or float64"),
    "bool positions": ((x(), P.bool(), F), "positions must be integers or floating point"),
    "complex positions": ((x(), P.cfloat(), F), "positions must be integers or floating point"),
    "positions without dims": ((x(), P[0, 0], F), "positions need 1 dim or more"),
    "frequencies of two dims": ((x(), P, F[0]), "freqs 3"),
    "frequencies of four dims": ((x(), P, F4), "freqs 3"),
    "integer frequencies": ((x(), P, F.int()), "freqs must be floating point"),
    "other number of axes": ((x(), torch.ones(3, 3), F), "the same number of axes"),
    "no axes": ((x(), P[:, :0], F[:0]), "at least 1"),
    "other number of heads": ((x(), P, torch.ones(2, 3, 4)), "1 head or those of the embeddings"),
    "too many pairs": ((x(), P, torch.ones(2, 2, 5)), "must lie inside the head"),
    "offset too large": ((x(), P, F, 0, 2, 1), "must lie inside the head"),
    "offset negative": ((x(), P, F[..., :2], 0, 2, -1), "must lie inside the head"),
    "offset near overflow": ((x(), P, F, 0, 2, 2**63 - 4), "must lie inside the head"),
    "block of 0": ((x(), P, F, 0, 0), "whole blocks of an even number"),
    "block of 3": ((x(), P, F, 0, 3), "whole blocks of an even number"),
    "block of 3 that divides": (
        (x(3, 2, 12), P, torch.ones(2, 2, 6), 0, 3),
        "whole blocks of an even number",
    ),
    "block of 6": ((x(), P, F, 0, 6), "whole blocks of an even number"),
    "block negative": ((x(), P, F, 0, -2), "whole blocks of an even number"),
    "block near overflow": ((x(), P, F, 0, 2**62), "whole blocks of an even number"),
    "prefix negative": ((x(), P, F, 0, 2, 0, -1), "fewer tokens than prefix tokens"),
    "prefix too long": ((x(), P, F, 0, 2, 0, 4), "fewer tokens than prefix tokens"),
    "prefix near overflow": ((x(), P, F, 0, 2, 0, 2**63 - 1), "fewer tokens than prefix tokens"),
    "prefix and all positions": ((x(), P, F, 0, 2, 0, 1), "can't be broadcast"),
    "prefix without tokens": ((x(2, 8), P[0], F, 0, 2, 0, 1), "need a dim of tokens"),
    "heads first without tokens": ((x(2, 8), P[0], F, 0, 2, 0, 0, True), "need a dim of tokens"),
    "heads that do not divide": ((x(2, 3, 16), P, F, 3), "can't be split into heads"),
    "heads negative": ((x(2, 3, 16), P, F, -2), "can't be split into heads"),
    "heads joined and first": ((x(2, 3, 16), P, F, 2, 2, 0, 0, True), "can't be split into heads"),
    "leading dims": ((x(), torch.ones(4, 2), F), "can't be broadcast"),
    "17 dims": ((x(*ONES_15, 2, 8), P[0], F), "at most 16 dimensions"),
    "17 dims after splitting heads": ((x(*ONES_15, 16), P[0], F, 2), "can't be split into heads"),
    "positions of 17 dims": ((x(), torch.ones(*ONES_16, 2), F), "at most 16 dimensions"),
    "result of 17 dims": ((x(2, 8), torch.ones(*ONES_15, 2), F), "more than 16 dimensions|not have more"),
    "frequencies of 17 dims": ((x(), P, torch.ones(*ONES_16, 2)), "at most 16 dimensions"),
}
OTHER_ERRORS = {
    "no tensor": (ops._rotate, (None, P, F), "not a plain strided tensor"),
    "in place, positions larger": (
        ops._rotate_,
        (x(1, 3, 2, 8), torch.ones(2, 3, 2), F),
        "more or larger leading dims",
    ),
    "in place, positions with more dims": (
        ops._rotate_,
        (x(), torch.ones(1, 2, 3, 2), F),
        "more or larger leading dims",
    ),
    "in place, expanded": (ops._rotate_, (x(1, 3, 2, 8).expand(2, 3, 2, 8), P, F), "may not be expanded"),
    "gradient of another shape": (
        ops._rotate_backward,
        (x(1, 3, 2, 8), x(), P, F, *SETTINGS, *NEEDS),
        "shape and dtype of the output",
    ),
    "gradient of another dtype": (
        ops._rotate_backward,
        (x().double(), x(), P, F, *SETTINGS, *NEEDS),
        "shape and dtype of the output",
    ),
    "gradient that misses dims": (
        ops._rotate_backward,
        (x(), x(), torch.ones(1, 2, 3, 2), F, *SETTINGS, *NEEDS),
        "more dims than the gradient",
    ),
    "gradient that was not broadcast": (
        ops._rotate_backward,
        (x(1, 3, 2, 8), x(1, 3, 2, 8), torch.ones(2, 3, 2), F, *SETTINGS, *NEEDS),
        "must have the broadcast shape",
    ),
    "gradient of integer positions": (
        ops._rotate_backward,
        (x(), x(), P.long(), F, *SETTINGS, *NEEDS),
        "integer positions have no gradient",
    ),
    "backward, wrong frequencies": (
        ops._rotate_backward,
        (x(), x(), P, F4, *SETTINGS, *NEEDS),
        "freqs 3",
    ),
    "angles of fewer dims": (ops._rotate_by_angles, (x(), A[0]), "the same number of dims"),
    "angles of other pairs": (ops._rotate_by_angles, (x(), A[..., :3]), "half as many channels"),
    "angles of other heads": (
        ops._rotate_by_angles,
        (x(), torch.ones(2, 3, 3, 4)),
        "1 head or those of the embeddings",
    ),
    "angles, one dim": (ops._rotate_by_angles, (x(8), A[0, 0, 0]), "need the dims of heads and channels"),
    "angles, integer embeddings": (ops._rotate_by_angles, (x().int(), A), "must be float16"),
    "integer angles": (ops._rotate_by_angles, (x(), A.int()), "angles must be floating point"),
    "angles, leading dims": (ops._rotate_by_angles, (x(), torch.ones(4, 3, 2, 4)), "can't be broadcast"),
    "angles, 17 dims": (
        ops._rotate_by_angles,
        (x(*ONES_15, 2, 8), torch.ones(*ONES_15, 2, 4)),
        "at most 16 dimensions",
    ),
    "angles in place, larger": (ops._rotate_by_angles_, (x(1, 3, 2, 8), A), "larger leading dims"),
    "angles in place, expanded": (
        ops._rotate_by_angles_,
        (x(1, 3, 2, 8).expand(2, 3, 2, 8), A),
        "may not be expanded",
    ),
    "angles in place, other pairs": (ops._rotate_by_angles_, (x(), A[..., :3]), "half as many channels"),
    "angles, gradient of another shape": (
        ops._rotate_by_angles_backward,
        (x(1, 3, 2, 8), x(), A, True, True),
        "shape and dtype of the embeddings",
    ),
    "angles, gradient of another dtype": (
        ops._rotate_by_angles_backward,
        (x().double(), x(), A, True, True),
        "shape and dtype of the embeddings",
    ),
    "angles, gradient that was not broadcast": (
        ops._rotate_by_angles_backward,
        (x(1, 3, 2, 8), x(1, 3, 2, 8), A, True, True),
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
    arguments = (*arguments, *SETTINGS[len(arguments) - 3 :])
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
    import gc
    import weakref

    embeddings = x()
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


# ---- TorchScript: functions of existing clients


def script_angles(positions: Tensor, rope_freqs: Tensor) -> Tensor:
    return calculate_rope(positions, rope_freqs)


def script_rotation(embeddings: Tensor, rope_encoding: Tensor) -> Tensor:
    return rotate_embeddings(embeddings, rope_encoding).flatten(-2, -1)


def script_rotation_in_place(embeddings: Tensor, rope_encoding: Tensor) -> Tensor:
    return rotate_embeddings(embeddings, rope_encoding, needs_autograd=False).view(embeddings.size(0), -1)


def script_rotation_backward(
    grad_rotated: Tensor, embeddings: Tensor, rope_encoding: Tensor, differentiable: bool
) -> tuple[Tensor | None, Tensor | None]:
    if differentiable:
        return rotate_embeddings_backward(grad_rotated, embeddings, rope_encoding)
    return rotate_embeddings_backward(
        grad_rotated,
        embeddings,
        rope_encoding,
        needs_grad_embeddings=True,
        needs_grad_rope_encoding=True,
        needs_autograd=False,
    )


def script_angles_backward(
    grad_angles: Tensor, positions: Tensor, rope_freqs: Tensor, needs_positions: bool, needs_freqs: bool
) -> tuple[Tensor | None, Tensor | None]:
    return calculate_rope_backward(grad_angles, positions, rope_freqs, needs_positions, needs_freqs)


def test_scripted_calculate_rope():
    positions, freqs = torch.randn(4, 3, 2), torch.randn(2, 2, 1, 4)
    scripted = torch.jit.script(script_angles)
    expected = torch.einsum("...p,pghf->...hf", positions, freqs)
    torch.testing.assert_close(scripted(positions, freqs), expected)
    leaves = leaf(positions), leaf(freqs)
    gradients = torch.autograd.grad(scripted(*leaves).sin().sum(), leaves)
    wanted = torch.autograd.grad(torch.einsum("...p,pghf->...hf", *leaves).sin().sum(), leaves)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def by_complex_numbers(embeddings, angles):
    pairs = torch.view_as_complex(embeddings.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def test_scripted_rotate_embeddings():
    embeddings, angles = torch.randn(3, 2, 8), torch.randn(3, 1, 4)
    scripted = torch.jit.script(script_rotation)
    leaves = leaf(embeddings), leaf(angles)
    rotated = scripted(*leaves)
    expected = by_complex_numbers(*leaves).flatten(-2)
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(rotated.sin().sum(), leaves)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_scripted_rotate_embeddings_in_place():
    embeddings, angles = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    expected = by_complex_numbers(embeddings, angles)
    rotated = torch.jit.script(script_rotation_in_place)(embeddings, angles)
    assert rotated.data_ptr() == embeddings.data_ptr()
    torch.testing.assert_close(embeddings, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("differentiable", [True, False])
def test_scripted_rotate_embeddings_backward(differentiable):
    embeddings, angles, g = leaf(torch.randn(3, 2, 8)), leaf(torch.randn(3, 1, 4)), torch.randn(3, 2, 8)
    expected = torch.autograd.grad(by_complex_numbers(embeddings, angles), (embeddings, angles), g)
    scripted = torch.jit.script(script_rotation_backward)
    actual = scripted(g, embeddings.detach(), angles.detach(), differentiable)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_scripted_calculate_rope_backward(needs):
    positions, freqs, g = leaf(torch.randn(4, 3, 2)), leaf(torch.randn(2, 2, 2, 4)), torch.randn(4, 3, 2, 4)
    expected = torch.autograd.grad(torch.einsum("...p,pghf->...hf", positions, freqs), (positions, freqs), g)
    scripted = torch.jit.script(script_angles_backward)
    actual = scripted(g, positions.detach(), freqs.detach(), *needs)
    for a, b, need in zip(actual, expected, needs, strict=True):
        if need:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert a is None


def test_scripted_functions_check_their_arguments():
    with pytest.raises(
        Exception, match="Expected embeddings and rope_encoding to have the same number of dims"
    ):
        torch.jit.script(script_rotation)(torch.randn(3, 2, 8), torch.randn(2, 4))
    embeddings = torch.randn(3, 2, 8, requires_grad=True)
    with pytest.raises(Exception, match="a leaf Variable that requires grad"):
        torch.jit.script(script_rotation_in_place)(embeddings, torch.randn(3, 2, 4))
    with pytest.raises(Exception, match="Expected 4 dimensions for rope_freqs"):
        torch.jit.script(script_angles)(torch.randn(3, 2), torch.randn(2, 2, 4))


@pytest.mark.parametrize("mode", ["high", "medium"])
def test_reduced_precision_of_matrix_products_changes_nothing(mode):
    """Positions that TF32 and bfloat16 would round."""
    module = RoPEEncodingND(1, 2, 1)
    nn.init.ones_(module.freqs[0])
    query, positions = torch.randn(2, 4, 2), torch.tensor([2047.0, 2049.0, 4099.0, 8195.0])[:, None]
    before = torch.get_float32_matmul_precision()
    results = []
    for precision in ("highest", mode):
        torch.set_float32_matmul_precision(precision)
        results.append(results_and_gradients(module, (query, positions), module.parameters()))
    torch.set_float32_matmul_precision(before)
    assert_same_bits(*results)
    expected = [
        math.cos(p) * a - math.sin(p) * b
        for (a, b), p in zip(query[0].tolist(), positions[:, 0].tolist(), strict=True)
    ]
    assert results[1][0][0, :, 0].tolist() == pytest.approx(expected, abs=1e-6)
