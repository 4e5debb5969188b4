"""DDP, FSDP2, tensor and sequence parallelism: two processes get what one gets, and rotations communicate nothing.

Models are in float64, where sums in another order differ by some 1e-16 of their terms: 1e-12 leaves room for
all of it, and none for a gradient that is missing a part.
"""

import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from nd_rotary_encodings import (
    RoPEEncodingND,
    _sharding,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    rotate_embeddings,
)

SEVERAL_GROUPS = [[True, False], [True, True], [False, True]]


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
        for done in as_completed(calls, timeout=120):  # the first error, for which the other one waits in vain
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
@pytest.mark.parametrize("options", [{}, {"per_image": True}, {"freq_group_pattern": SEVERAL_GROUPS}], ids=str)
def test_data_parallel_training_is_that_of_one_process(both, wrap, options):
    assert_like_alone(both(data_parallel, wrap, **options), **options)


def shard_freqs_by_head(name, module, mesh):
    if isinstance(module, nn.ParameterList):
        for i, freqs in enumerate(module):
            module[i] = nn.Parameter(distribute_tensor(freqs, mesh, [Shard(1)]))


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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"per_image": True}, {"freq_group_pattern": SEVERAL_GROUPS}], ids=str)
def test_tensor_parallel_training_is_that_of_one_process(both, options, compiled):
    assert_like_alone(both(tensor_parallel, compiled, **options), **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("share_heads", [False, True])
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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"per_image": True}, {"freq_group_pattern": SEVERAL_GROUPS}], ids=str)
@pytest.mark.parametrize("plain_positions", [False, True], ids=["positions sharded", "positions plain"])
def test_sequence_parallel_training_is_that_of_one_process(both, plain_positions, options, compiled):
    assert_like_alone(both(sequence_parallel, compiled, plain_positions, **options), **options)
