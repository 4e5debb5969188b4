"""Programs that leave this process: torch.export, AOTInductor, decompositions, ONNX."""

import subprocess
import sys

import onnxruntime
import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.export import Dim

from nd_rotary_encodings import (
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    decompositions,
    rotate_embeddings,
    rotate_embeddings_backward,
)

SETTINGS = {"layout": "half", "rotary_offset": 2, "num_prefix_tokens": 1, "inverse": True}


class Functions(nn.Module):
    """All functions but the module: x [B, N, 16], positions [N, 2]."""

    def __init__(self):
        super().__init__()
        self.freqs = nn.Parameter(torch.linspace(-1, 2, 12).view(2, 2, 3))
        self.projection = nn.Linear(16, 48)

    def forward(self, x, positions):
        heads = x.unflatten(-1, (2, 8))
        transposed = torch.cat((heads[:, :1], heads), dim=1).transpose(1, 2)
        heads_first = (
            apply_rope(t, positions, self.freqs, head_dim_first=True, **SETTINGS)
            for t in (transposed, transposed.contiguous())
        )
        packed = self.projection(x).unflatten(-1, (3, 2, 8))
        return (
            # views that only the strides of the kernel's results allow
            next(heads_first).transpose(1, 2).view(x.shape[0], -1, 16),
            next(heads_first).view(x.shape[0], -1, 8),
            apply_rope_(heads + 1, positions.long(), self.freqs, layout=2),
            apply_rope_qkv_(packed, positions, self.freqs),
        )


class GivenAngles(nn.Module):
    def __init__(self):
        super().__init__()
        self.freqs = nn.Parameter(torch.linspace(-1, 2, 16).view(2, 1, 2, 4))

    def forward(self, x, positions):
        heads, angles = x.unflatten(-1, (2, 8)), calculate_rope(positions, self.freqs)[None]
        rotated = rotate_embeddings(heads, angles)
        return angles, rotated, rotate_embeddings(rotated * 1, angles, needs_autograd=False)


class Gradients(nn.Module):
    def forward(self, x, positions):
        heads, angles = x.unflatten(-1, (2, 8)), positions[None, :, None].repeat(x.shape[0], 1, 2, 2)
        return rotate_embeddings_backward(heads, heads, angles, needs_autograd=False)


PROGRAMS = {
    "module": lambda: RoPEEncodingND(2, 16, 2),
    "groups": lambda: RoPEEncodingND(2, 16, 2, freq_group_pattern=[[1, 0], [0, 1]]),
    "forward only": lambda: RoPEEncodingND(2, 16, 2, forward_only=True),
    "functions": Functions,
    "given angles": GivenAngles,
    "gradients": Gradients,
    "in place": lambda: RoPEEncodingND(2, 16, 2, forward_only=True, inplace=True),
}


class Several(nn.Module):
    """Programs on one input, the last of which writes into it."""

    def __init__(self, *names):
        super().__init__()
        self.programs = nn.ModuleList(PROGRAMS[name]() for name in (*names, "in place"))
        self.requires_grad_(False)

    def forward(self, x, positions):
        values = [program(x, positions) for program in self.programs]
        return [tensor for v in values for tensor in (v if isinstance(v, tuple) else (v,))]


ANY_SIZE = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})


def inputs(batch=2, tokens=5, extent=9):
    return torch.randn(batch, tokens, 16), torch.rand(tokens, 2) * extent


def exported(module, strict=False):
    return torch.export.export(module, inputs(), dynamic_shapes=ANY_SIZE, strict=strict)


@pytest.fixture(scope="module")
def everything():
    """A module, and its program for any batch and number of tokens."""
    module = Several(*(name for name in PROGRAMS if name != "in place"))
    return module, exported(module)


def results(module, x, positions):
    """What is returned, and what became of the input."""
    x = x.clone()
    values = module(x, positions)
    return [*(values if isinstance(values, (tuple, list)) else (values,)), x]


def namespaces(program):
    """Of all operators, those for control flow and mutation under their own names."""
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    # what is left out is arithmetic with sizes, and taking results out of tuples
    return {getattr(call, "namespace", None) or str(call) for call in calls if call.__module__ != "_operator"}


def assert_close(actual, expected, channels=8, tolerance=1e-6):
    """In units of the norm of so many channels: 2 for pairs of neighbors, 8 for a head of these tests."""
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        error, e = (a - e).double().view(-1, channels), e.double().view(-1, channels)
        assert (error.norm(dim=-1) <= tolerance * e.norm(dim=-1)).all()


def assert_same_bits(program, module):
    assert "nd_rotary" in namespaces(program)
    other_sizes = inputs(3, 7)
    actual, expected = results(program.module(), *other_sizes), results(module, *other_sizes)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), i
        assert a.stride() == e.stride(), i


def test_exported_programs_call_the_kernels_unless_asked_otherwise(everything):
    module, program = everything
    assert_same_bits(program, module)
    assert_same_bits(program.run_decompositions(), module)


@torch.no_grad()
def test_programs_of_strict_export_call_the_kernels():
    module = Functions()
    assert_same_bits(exported(module, strict=True), module)


def test_decompositions_leave_only_pytorchs_operators(everything):
    module, program = everything
    program, other_sizes = program.run_decompositions(decompositions()), inputs(3, 7)
    assert namespaces(program) == {"aten"}
    assert_close(results(program.module(), *other_sizes), results(module, *other_sizes))


def test_decompositions_reach_all_of_a_program_that_was_exported_for_training():
    assert namespaces(exported(Functions()).run_decompositions(decompositions())) == {"aten"}


def test_decompositions_join_those_of_pytorch_and_stay_differentiable():
    module = RoPEEncodingND(2, 16, 2)
    table = torch.export.default_decompositions()
    table.update(decompositions())
    program, (query, positions) = exported(module).run_decompositions(table), inputs(3, 7)
    assert namespaces(program) == {"aten"}
    query.requires_grad_()
    gradients = [
        torch.autograd.grad(m(query, positions).sin().sum(), (query, m.get_parameter("freqs.0")))
        for m in (program.module(), module)
    ]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_decompositions_are_the_callers_own():
    decompositions().clear()
    assert torch.ops.nd_rotary.apply_rope.default in decompositions()


# ---- another process

FRESH_PROCESS = """
import sys
import nd_rotary_encodings, torch
import torch._inductor.codecache  # torch 2.10 forgets to

_, kind, path = sys.argv
load = torch._inductor.aoti_load_package if kind == "AOTInductor" else lambda p: torch.export.load(p).module()
(x, positions), expected = torch.load(path + ".results")
actual = [*load(path)(x, positions), x]
assert len(actual) == len(expected)
assert all(torch.equal(a, e) and a.stride() == e.stride() for a, e in zip(actual, expected)), path
print("same bits")
"""


def run_in_a_fresh_process(kind, path, module):
    arguments = inputs(3, 7)
    torch.save((arguments, results(module, *arguments)), f"{path}.results")
    process = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, kind, path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.stdout == "same bits\n", process.stderr


def test_saved_programs_run_where_only_this_package_is_imported(everything, tmp_path):
    module, program = everything
    torch.export.save(program, tmp_path / "program.pt2")
    run_in_a_fresh_process("export", tmp_path / "program.pt2", module)


def test_aotinductor_packages_run_where_only_this_package_is_imported(tmp_path):
    module, path = Several("functions"), str(tmp_path / "program.pt2")
    torch._inductor.aoti_compile_and_package(
        exported(module),
        package_path=path,
        # vectors for PyTorch's own kernels, for which the compiler is tried for many seconds
        inductor_configs={"cpp.vec_isa_ok": False},
    )
    run_in_a_fresh_process("AOTInductor", path, module)


# ---- ONNX


def run_onnx(program, *tensors):
    """By onnxruntime, after a look at what the program consists of."""
    model = program.model_proto
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    if Version(onnxruntime.__version__) < Version("1.29"):
        pytest.skip("onnxruntime before 1.29 has no cosines in float64")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]
    assert len(names) == len(tensors)
    values = session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})
    return [torch.from_numpy(value) for value in values]


def test_onnx_of_a_decomposed_program(everything):
    module, program = everything
    onnx = torch.onnx.export(program.run_decompositions(decompositions()), dynamo=True, verbose=False)
    other_sizes = inputs(3, 7)
    assert_close(run_onnx(onnx, *other_sizes), results(module, *other_sizes)[:-1])


@pytest.mark.parametrize("name", ["functions", "given angles", "in place"])
def test_onnx_of_functions(name):
    module, other_sizes = PROGRAMS[name]().requires_grad_(False).eval(), inputs(3, 7)
    onnx = torch.onnx.export(module, inputs(), dynamic_shapes=ANY_SIZE, dynamo=True, verbose=False)
    assert_close(run_onnx(onnx, *other_sizes), results(module, *other_sizes)[:-1])


@pytest.mark.parametrize(
    ("dtype", "position_dtype", "tolerance"),
    [(torch.float32, torch.float32, 1e-6), (torch.float16, torch.int64, 1e-3)],
    ids=["float32", "float16"],
)
def test_onnx_of_the_module_is_exact_at_large_positions(dtype, position_dtype, tolerance):
    module = RoPEEncodingND(2, 16, 2).requires_grad_(False).eval()

    def arguments(*sizes, extent=9):
        query, positions = inputs(*sizes, extent)
        return query.to(dtype), positions.to(position_dtype)

    onnx = torch.onnx.export(module, arguments(2, 5), dynamic_shapes=ANY_SIZE, dynamo=True, verbose=False)
    for extent in (9, 1e3, 1e6):
        query, positions = arguments(3, 70, extent=extent)
        assert_close(run_onnx(onnx, query, positions), [module(query, positions)], 2, tolerance)
