"""What a rotation allocates, and what training with it keeps: no more than a layer without it."""

import itertools

import pytest
import torch
from conftest import EMULATION, saved_storages
from packaging.version import Version
from torch import nn

from nd_rotary_encodings import RoPEEncodingND

POSITIONS = torch.rand(500, 3) * 20 - 5


def make(**options):
    return RoPEEncodingND(3, 24, 2, **options)


def allocations(call):
    """What PyTorch's CPU allocator hands out (positive) and takes back during a call, in order."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = call()
    events = profile.profiler.kineto_results.events()
    del kept
    memory = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]


def allocated_bytes(call):
    return sum(size for size in allocations(call) if size > 0)


def peak_bytes(call):
    """How far the memory in use rises above what it was before the call."""
    return max(itertools.accumulate(allocations(call), initial=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"use_checkpointing": True}, {"forward_only": True}], ids=str)
def test_forward_allocates_its_output_and_nothing_else(options, dtype):
    module, query, positions = make(**options), torch.randn(8, 500, 24).to(dtype), POSITIONS.clone()
    module(query, positions)
    assert allocated_bytes(lambda: module(query, positions)) == query.numel() * query.element_size()


def test_in_place_allocates_nothing():
    module = make(forward_only=True, inplace=True)
    query, key, positions = torch.randn(8, 500, 72)[..., :24], torch.randn(8, 500, 24), POSITIONS.clone()
    module(query, positions, key)
    assert allocated_bytes(lambda: module(query, positions, key)) == 0


@pytest.mark.skipif(bool(EMULATION), reason="partial sums of the CUDA kernels come from PyTorch's allocator")
def test_backward_allocates_its_gradients_and_nothing_else():
    module, query, positions = (
        make(),
        torch.randn(8, 500, 24, requires_grad=True),
        POSITIONS.clone().requires_grad_(),
    )
    gradient = torch.randn(8, 500, 24)
    leaves = [query, positions, module.freqs[0]]
    rotated = module(query, positions)
    expected = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    assert allocated_bytes(lambda: torch.autograd.grad(rotated, leaves, gradient)) == expected


@pytest.mark.parametrize("options", [{}, {"use_checkpointing": True}], ids=str)
def test_training_keeps_the_output_positions_and_frequencies_only(options):
    module = make(**options)
    query, positions = torch.randn(8, 500, 24, requires_grad=True), POSITIONS.clone().requires_grad_()
    saved, rotated = saved_storages(lambda: module(query, positions))
    kept = (rotated, positions, module.freqs[0])
    assert set(saved) == {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert sum(saved.values()) == sum(tensor.numel() * tensor.element_size() for tensor in kept)


def test_frozen_frequencies_keep_not_even_the_output():
    module = make().requires_grad_(False)
    query, positions = torch.randn(8, 500, 24, requires_grad=True), POSITIONS.clone()
    saved, _ = saved_storages(lambda: module(query, positions))
    assert set(saved) == {tensor.untyped_storage().data_ptr() for tensor in (positions, module.freqs[0])}


# ---- attention layers


class Attention(nn.Module):
    """Multi-head attention of 256 tokens with 4 heads of 16 channels."""

    def __init__(self, rotation):
        super().__init__()
        self.rotation = rotation
        self.rope = RoPEEncodingND(
            2, 64, 4, forward_only=rotation == "forward only", inplace=rotation == "forward only"
        )
        self.project = nn.Linear(64, 192)
        self.separate = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64)

    def forward(self, tokens, positions):
        if self.rotation in ("packed", "no packed"):
            qkv = self.project(tokens)
            if self.rotation == "packed":
                qkv = self.rope.rotate_qkv_(qkv, positions)
            query, key, value = qkv.chunk(3, -1)
        else:
            query, key, value = (project(tokens) for project in self.separate)
            if self.rotation != "no separate":
                query, key = self.rope(query, positions, key)
        heads = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(2))


GRID = RoPEEncodingND.position_grid((8, 16, 16, 64)).flatten(0, 1).float()
ROTATIONS = [("packed", "no packed"), ("separate", "no separate")]


keeps_more = pytest.mark.xfail(
    Version(torch.__version__) < Version("2.12"),
    raises=AssertionError,
    reason="torch.compile before 2.12 keeps more of a packed projection",
)


def saved_bytes(rotation, tokens, compiled):
    layer = Attention(rotation)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    run(tokens, GRID)
    saved, _ = saved_storages(lambda: run(tokens, GRID))
    kept_anyway = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), GRID)}
    return sum(size for place, size in saved.items() if place not in kept_anyway)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=keeps_more)], ids=["eager", "compiled"])
@pytest.mark.parametrize(("rotation", "without"), ROTATIONS)
def test_attention_keeps_no_more_for_its_backward_than_without_rotation(rotation, without, compiled):
    tokens = torch.randn(8, 256, 64)
    assert saved_bytes(rotation, tokens, compiled) == saved_bytes(without, tokens, compiled)


def peak_of_training(rotation, learned):
    layer, tokens = Attention(rotation), torch.randn(8, 256, 64)
    layer.rope.requires_grad_(learned)

    def step():
        layer(tokens.clone().requires_grad_(), GRID).sum().backward()

    step()
    return peak_bytes(step)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "frozen"])
@pytest.mark.parametrize(("rotation", "without"), ROTATIONS)
def test_attention_trains_at_the_peak_of_a_layer_without_rotation(rotation, without, learned):
    allowed = peak_of_training(without, learned)
    if rotation == "packed" and learned:
        # the projection, from which the gradients of the frequencies are formed, is still there while the
        # gradients of its three parts are joined
        allowed *= 1.05
    assert peak_of_training(rotation, learned) <= allowed


def peak_of_inference(rotation, tokens):
    layer = Attention(rotation)
    with torch.no_grad():
        layer(tokens, GRID)
        return peak_bytes(lambda: layer(tokens, GRID))


def test_attention_in_place_infers_at_the_peak_of_a_layer_without_rotation():
    tokens = torch.randn(8, 256, 64)
    assert peak_of_inference("forward only", tokens) == peak_of_inference("no separate", tokens)
