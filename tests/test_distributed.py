"""DDP, FSDP2, tensor and sequence parallelism: two processes get what one gets; rotations send nothing.

Models are in float64, where sums in another order differ by some 1e-16 of their terms: 1e-12 leaves room for
all of it, and none for a gradient that is missing a part.
"""

import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from packaging.version import Version
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from nd_rotary_encodings import (
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    rotate_embeddings,
)

# Errors, never wrong results. TypeError: from a process whose error can't be sent to this one
views_of_shards = pytest.mark.xfail(
    Version(torch.__version__) < Version("2.13"),
    raises=(RuntimeError, TypeError),
    reason="before torch 2.12 DTensor flattens no dims, as matmul does, if one after the first is sharded, "
    "and 2.12 compiles none",
)

SEVERAL_GROUPS = [[True, False], [True, True], [False, True]]
OPTIONS = {
    "one group": {},
    "positions per image": {"per_image": True},
    "groups": {"freq_group_pattern": SEVERAL_GROUPS},
}


class Attention(nn.Module):
    def __init__(self, embed_dim=24, n_heads=2, **options):
        super().__init__()
        self.n_heads = n_heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.rope = RoPEEncodingND(2, embed_dim, n_heads, **options)
        self.double()

    def forward(self, x, positions):
        q, k = self.rope(self.to_q(x), positions, self.to_k(x))
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, self.to_v(x)))
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(-2))


def shard_freqs_by_head(name, module, mesh):
    if isinstance(module, nn.ParameterList):
        for i, freqs in enumerate(module):
            module[i] = nn.Parameter(distribute_tensor(freqs, mesh, [Shard(1)]))


def model_and_data(per_image=False, **options):
    torch.manual_seed(0)
    model = Attention(**options)
    x, target = torch.randn(2, 4, 6, 24, dtype=torch.float64)
    positions = torch.rand(*([4] if per_image else []), 6, 2, dtype=torch.float64) * 9
    return model, x, positions.requires_grad_(), target


def mean_square(y, target):
    """In steps, as the gradient of ``F.mse_loss`` of two DTensors is too large by the number of shards."""
    return (y - target).square().mean()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_and_gradients(loss, model, positions=None):
    loss = whole(loss)
    loss.backward()
    gradients = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    if positions is not None:
        gradients["positions"] = whole(positions.grad)
    return loss.detach(), gradients


def alone(**options):
    model, x, positions, target = model_and_data(**options)
    return loss_and_gradients(mean_square(model(x, positions), target), model, positions)


# ---- one process of a group whose other members don't exist: what is kept, and that nothing is sent


@pytest.fixture(scope="module")
def mesh():
    """Two of four processes. One for all tests, as compiled code takes equal meshes for the same."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


def placements(dims):
    return [Replicate() if d is None else Partial() if d == "sum" else Shard(d) for d in dims]


def part(tensor, mesh, dims):
    """The part of ``tensor`` that the first process has, one dim (or None) for each dim of the mesh."""
    return distribute_tensor(tensor, mesh, placements(dims), src_data_rank=None)


B, N, H, D, P = 4, 6, 2, 8, 2
X, POSITIONS, FREQS = (B, N, H, D), (B, N, P), (P, H, D // 2)
# shapes and sharded dims of x, positions and freqs; dims of the result; dims of the gradients
KEPT = {
    "batch": ([X, POSITIONS, FREQS], [0, 0, None], 0, [0, 0, "sum"]),
    "batch, one set of positions": ([X, (N, P), FREQS], [0, None, None], 0, [0, "sum", "sum"]),
    "batch, positions of size 1": ([X, (1, N, P), FREQS], [0, None, None], 0, [0, "sum", "sum"]),
    "batch of positions, x of size 1": (
        [(1, N, H, D), POSITIONS, FREQS],
        [None, 0, None],
        0,
        ["sum", 0, "sum"],
    ),
    "batch of positions, one x": ([(N, H, D), POSITIONS, FREQS], [None, 0, None], 0, ["sum", 0, "sum"]),
    "tokens": ([X, POSITIONS, FREQS], [1, 1, None], 1, [1, 1, "sum"]),
    "tokens, one set of positions": ([X, (N, P), FREQS], [1, 0, None], 1, [1, 0, "sum"]),
    "tokens, one position": ([X, (B, 1, P), FREQS], [1, None, None], 1, [1, "sum", "sum"]),
    "tokens, uneven": ([(B, 5, H, D), (B, 5, P), FREQS], [1, 1, None], 1, [1, 1, "sum"]),
    "heads": ([X, POSITIONS, FREQS], [2, None, 1], 2, [2, "sum", 1]),
    "heads, one set of frequencies": ([X, POSITIONS, (P, 1, D // 2)], [2, None, None], 2, [2, "sum", "sum"]),
    "nothing": ([X, POSITIONS, FREQS], [None] * 3, None, [None] * 3),
}
HEADS_FIRST = {
    "batch": ([0, 0, None], 0, [0, 0, "sum"]),
    "heads": ([1, None, 1], 1, [1, "sum", 1]),
    "tokens": ([2, 1, None], 2, [2, 1, "sum"]),
}


def assert_kept(mesh, shapes, dims, y_dims, gradient_dims, **options):
    """The first process computes what it has as if that was all, with the same bits."""
    tensors = [
        part(torch.randn(shape), mesh, d).requires_grad_() for shape, d in zip(shapes, dims, strict=True)
    ]
    local = [t.to_local().detach().clone().requires_grad_() for t in tensors]
    expected = apply_rope(*local, **options)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, local, weights)
    with CommDebugMode() as sent:
        y = apply_rope(*tensors, **options)
        gradients = torch.autograd.grad(
            y, tensors, DTensor.from_local(weights, mesh, y.placements, shape=y.shape, stride=y.stride())
        )
    assert sent.get_total_counts() == 0
    assert list(y.placements) == placements(y_dims)
    assert torch.equal(y.to_local(), expected)
    for tensor, gradient, want, d in zip(tensors, gradients, wanted, gradient_dims, strict=True):
        assert list(gradient.placements) == placements(d)
        assert gradient.shape == tensor.shape
        assert torch.equal(gradient.to_local(), want)


def one_dim(dims):
    return [[d] for d in dims]


@pytest.mark.parametrize(("shapes", "dims", "y_dim", "gradient_dims"), KEPT.values(), ids=KEPT.keys())
def test_sharded_tensors_stay_where_they_are(mesh, shapes, dims, y_dim, gradient_dims):
    assert_kept(mesh, shapes, one_dim(dims), [y_dim], one_dim(gradient_dims))


@pytest.mark.parametrize(("dims", "y_dim", "gradient_dims"), HEADS_FIRST.values(), ids=HEADS_FIRST.keys())
def test_sharded_tensors_with_heads_first_stay_where_they_are(mesh, dims, y_dim, gradient_dims):
    shapes = [(B, H, N, D), POSITIONS, FREQS]
    options = {"head_dim_first": True, "layout": "half", "inverse": True}
    assert_kept(mesh, shapes, one_dim(dims), [y_dim], one_dim(gradient_dims), **options)


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_sharded_tensors_with_prefix_tokens_stay_where_they_are(mesh, name):
    shapes, dims, y_dim, gradient_dims = KEPT[name]
    shapes = [(B, N + 3, H, D), *shapes[1:]]
    assert_kept(mesh, shapes, one_dim(dims), [y_dim], one_dim(gradient_dims), num_prefix_tokens=3)


@pytest.mark.usefixtures("mesh")
def test_batch_and_heads_can_be_sharded_over_two_dims_of_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2))
    dims, gradient_dims = [[0, 2], [0, None], [None, 1]], [[0, 2], [0, "sum"], ["sum", 1]]
    assert_kept(mesh, [X, POSITIONS, FREQS], dims, [0, 2], gradient_dims)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "tokens", "heads"])
@pytest.mark.parametrize("pattern", [None, SEVERAL_GROUPS], ids=["one group", "groups"])
def test_module_sends_nothing_whatever_dim_is_sharded(mesh, pattern, dim):
    rope = RoPEEncodingND(2, 24, 2, freq_group_pattern=pattern)
    rope = distribute_module(rope, mesh, shard_freqs_by_head if dim == 2 else None)
    query = part(torch.randn(B, N, 24), mesh, [dim]).requires_grad_()
    positions = part(torch.rand(N, 2) * 9, mesh, [0 if dim == 1 else None])
    with CommDebugMode() as sent:
        rotated = rope(query, positions)
        rotated.sum().backward()
    assert sent.get_total_counts() == 0
    assert rotated.placements == query.grad.placements == (Shard(dim),)
    assert rope.freqs[0].grad.placements == ((Shard(1),) if dim == 2 else (Partial(),))


@views_of_shards
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "tokens", "heads"])
def test_given_angles_send_nothing_whatever_dim_is_sharded(mesh, dim):
    x = part(torch.randn(X), mesh, [dim]).requires_grad_()
    positions = part(torch.randn(POSITIONS), mesh, [dim if dim < 2 else None]).requires_grad_()
    freqs = part(torch.randn(P, 1, H, D // 2), mesh, [2 if dim == 2 else None]).requires_grad_()
    local = [t.to_local().detach().clone().requires_grad_() for t in (x, positions, freqs)]
    expected = rotate_embeddings(local[0], calculate_rope(*local[1:]))
    wanted = torch.autograd.grad(expected.sum(), local)
    with CommDebugMode() as sent:
        y = rotate_embeddings(x, calculate_rope(positions, freqs))
        gradients = torch.autograd.grad(y.sum(), (x, positions, freqs))
    assert sent.get_total_counts() == 0
    assert y.placements == (Shard(dim),)
    assert torch.equal(y.to_local(), expected)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.to_local(), want)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "tokens", "heads"])
def test_compiled_graphs_send_nothing_whatever_dim_is_sharded(mesh, dim):
    tensors = [
        part(torch.randn(X), mesh, [dim]).requires_grad_(),
        part(torch.randn(POSITIONS), mesh, [dim if dim < 2 else None]).requires_grad_(),
        part(torch.randn(FREQS), mesh, [1 if dim == 2 else None]).requires_grad_(),
    ]
    torch.compiler.reset()
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(apply_rope, backend=backend, dynamic=False, fullgraph=True)
    compiled(*tensors).sum().backward()
    assert len(graphs) == 2
    for graph in graphs:
        targets = [str(node.target) for node in graph.graph.nodes]
        assert any("nd_rotary" in target for target in targets)
        assert not any("c10d" in target for target in targets)


def test_a_plain_x_beside_a_dtensor_is_an_error(mesh):
    freqs = part(torch.randn(FREQS), mesh, [0])
    with pytest.raises(ValueError, match=r"Expected x .* to be a DTensor where positions or freqs are"):
        apply_rope(torch.randn(X), torch.randn(POSITIONS), freqs)


FIRST_CALL = """
import sys
import torch
import nd_rotary_encodings
assert "torch.distributed.tensor" not in sys.modules, "it takes half a second to import"

import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

mesh = DeviceMesh("cpu", [0, 1])
x, positions, freqs = torch.randn(4, 6, 2, 8), torch.randn(6, 2), torch.randn(2, 2, 4)
compiled = torch.compile(nd_rotary_encodings.apply_rope, backend="aot_eager", fullgraph=True)
y = compiled(DTensor.from_local(x, mesh, [Shard(0)]), positions, freqs)
assert torch.equal(y.to_local(), nd_rotary_encodings.apply_rope(x, positions, freqs))
"""


def test_rules_are_registered_when_the_first_dtensor_comes_also_into_compiled_code():
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True)


# ---- two processes


def join(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """``both(function, *arguments)``: its results in the two processes of a group."""
    path = tmp_path_factory.mktemp("group") / "store"
    context = multiprocessing.get_context("spawn")
    processes = [ProcessPoolExecutor(1, context, join, (rank, path)) for rank in range(2)]

    def call(function, *arguments, **options):
        calls = [process.submit(function, *arguments, **options) for process in processes]
        for done in as_completed(
            calls, timeout=120
        ):  # the first error, for which the other one waits in vain
            done.result()
        return [c.result() for c in calls]

    yield call
    call(dist.destroy_process_group)
    for process in processes:
        process.shutdown()


def assert_like_alone(results, **options):
    loss, gradients = alone(**options)
    assert gradients["rope.freqs.0"].abs().min() > 1e-8
    for actual_loss, actual in results:
        torch.testing.assert_close(actual_loss, loss, rtol=1e-12, atol=1e-12)
        assert actual.keys() <= gradients.keys()
        assert actual.keys() >= gradients.keys() - {"positions"}
        for name, gradient in actual.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12, msg=name)


def compiled_if(compiled, model):
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model


def data_parallel(wrap, **options):
    """Each process has half of the batch, and gradients are averaged."""
    model, x, positions, target = model_and_data(**options)
    part = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    model = wrap(model)
    own_positions = positions[part] if positions.ndim == 3 else positions
    loss, gradients = loss_and_gradients(mean_square(model(x[part], own_positions), target[part]), model)
    dist.all_reduce(loss)
    return loss / 2, gradients


def fully_sharded(model):
    """The frequencies in a unit of their own, of which each process keeps some axes."""
    fully_shard(model.rope)
    fully_shard(model)
    assert model.rope.freqs[-1].placements == (Shard(0),)
    return model


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_sharded])
@pytest.mark.parametrize("name", OPTIONS)
def test_data_parallel_training_is_that_of_one_process(both, wrap, name):
    assert_like_alone(both(data_parallel, wrap, **OPTIONS[name]), **OPTIONS[name])


def tensor_parallel(compiled=False, freqs_by_head=True, **options):
    """Each process has one of the heads."""
    mesh = init_device_mesh("cpu", (2,))
    model, x, positions, target = model_and_data(**options)
    columns = ColwiseParallel(use_local_output=False)
    plan = {"to_q": columns, "to_k": columns, "to_v": columns, "to_out": RowwiseParallel()}
    model = parallelize_module(model, mesh, plan)
    if freqs_by_head:
        model.rope = distribute_module(model.rope, mesh, shard_freqs_by_head)
        assert model.rope.freqs[0].to_local().shape[1] == 1
    forward = compiled_if(compiled, model)
    return loss_and_gradients(mean_square(forward(x, positions), target), model, positions)


@views_of_shards
@pytest.mark.parametrize(
    ("name", "compiled"),
    [("one group", False), ("positions per image", False), ("groups", False), ("groups", True)],
)
def test_tensor_parallel_training_is_that_of_one_process(both, name, compiled):
    assert_like_alone(both(tensor_parallel, compiled, **OPTIONS[name]), **OPTIONS[name])


@views_of_shards
@pytest.mark.parametrize(("share_heads", "compiled"), [(False, False), (True, False), (False, True)])
def test_plain_frequencies_beside_sharded_heads_get_the_whole_gradient(both, share_heads, compiled):
    results = both(tensor_parallel, compiled, freqs_by_head=False, share_heads=share_heads)
    assert_like_alone(results, share_heads=share_heads)


def sequence_parallel(compiled=False, plain_positions=False, **options):
    """Each process has half of the tokens."""
    mesh = init_device_mesh("cpu", (2,))
    model, x, positions, target = model_and_data(**options)
    model = distribute_module(model, mesh)
    x, target = (distribute_tensor(t, mesh, [Shard(1)]) for t in (x, target))
    if not plain_positions:
        positions = distribute_tensor(positions.detach(), mesh, [Shard(positions.ndim - 2)]).requires_grad_()
    forward = compiled_if(compiled, model)
    return loss_and_gradients(mean_square(forward(x, positions), target), model, positions)


@views_of_shards
@pytest.mark.parametrize(
    ("name", "plain_positions", "compiled"),
    [
        ("one group", False, False),
        ("positions per image", False, False),
        ("groups", False, True),
        ("one group", True, False),
        ("positions per image", True, True),
    ],
)
def test_sequence_parallel_training_is_that_of_one_process(both, name, plain_positions, compiled):
    results = both(sequence_parallel, compiled, plain_positions, **OPTIONS[name])
    assert_like_alone(results, **OPTIONS[name])


def rotated(x, positions, freqs):
    return apply_rope(x, positions, freqs)


def rotated_in_place(x, positions, freqs):
    return apply_rope_(x * 1, positions, freqs)


def rotated_qkv(x, positions, freqs):
    qkv = x.unsqueeze(-3).expand(-1, -1, 3, -1, -1) * 1
    return apply_rope_qkv_(qkv, positions, freqs)


def rotated_after_prefix(x, positions, freqs):
    return apply_rope(x, positions[..., 2:, :], freqs, num_prefix_tokens=2)


def rotated_by_given_angles(x, positions, freqs):
    return rotate_embeddings(x, calculate_rope(positions, freqs[:, None]))


def gradients_of_gradients(function, tensors):
    """Of all elements of the result, and of the gradients, with weights. Only sums are made whole, as second
    derivatives through ``full_tensor`` are wrong before torch 2.12."""
    y = function(*tensors)
    first = torch.autograd.grad(whole(y.sin().sum()), tensors, create_graph=True)
    second = torch.autograd.grad(sum(whole(g.cos().sum()) for g in first), tensors)
    return [whole(t).detach() for t in (y, *first, *second)]


def assert_function_is_that_of_one_process(function, dims):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in (X, POSITIONS, FREQS)]
    wanted = gradients_of_gradients(function, [t.clone().requires_grad_() for t in tensors])
    shards = [part(t, mesh, [dim]).requires_grad_() for t, dim in zip(tensors, dims, strict=True)]
    for actual, want in zip(gradients_of_gradients(function, shards), wanted, strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12)


@views_of_shards
@pytest.mark.parametrize(
    "dims",
    [(0, 0, None), (1, 1, None), (2, None, 1), (3, None, None)],
    ids=["batch", "tokens", "heads", "channels, to be gathered"],
)
@pytest.mark.parametrize(
    "function", [rotated, rotated_in_place, rotated_qkv, rotated_after_prefix, rotated_by_given_angles]
)
def test_functions_and_their_gradients_are_those_of_one_process(both, function, dims):
    both(assert_function_is_that_of_one_process, function, dims)


def run_documentation():
    text = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()
    names = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(snippet, names)
    return names["model"].rope.freqs[0].grad.full_tensor().abs().min()


@views_of_shards
def test_the_code_of_the_documentation_runs(both):
    smallest = both(run_documentation)
    assert smallest[0] == smallest[1] > 0
