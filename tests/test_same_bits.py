"""The same bits from every number of threads, every instruction set, every batch and every run."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import INSTRUCTION_SETS
from hypothesis import given
from strategies import (
    EMBEDDING_DTYPES,
    MEMORY_KINDS,
    calls,
    in_memory,
    name,
    random_embeddings,
    random_freqs,
    random_positions,
    same_bits,
)

from nd_rotary_encodings import (
    _C,
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    rotate_embeddings,
    rotate_embeddings_backward,
)

# Shapes of x, positions and freqs, and settings. All are large enough to be cut into pieces for several
# threads: many tokens and few repeats, few tokens and many repeats, wide rows, tails, every layout.
PROBLEMS = {
    "many_tokens": ((2, 700, 4, 64), (700, 2), (2, 4, 32), {}),
    "own_positions": ((9, 80, 4, 32), (9, 80, 2), (2, 4, 16), {}),
    "one_position": ((900, 1, 8, 32), (1, 2), (2, 8, 16), {}),
    "no_token_dim": ((900, 8, 32), (3,), (3, 1, 16), {"layout": "half"}),
    "three_positions": ((400, 3, 4, 34), (3, 2), (2, 4, 17), {"layout": "half"}),
    "wide_rows": ((40, 5, 16, 128), (5, 3), (3, 16, 64), {}),
    "tails": ((5, 300, 3, 19), (300, 1), (1, 1, 7), {"layout": 14, "rotary_offset": 3}),
    "blocks": ((5, 200, 3, 24), (200, 2), (2, 3, 12), {"layout": 6, "inverse": True}),
    "prefix": ((5, 203, 3, 32), (200, 2), (2, 3, 16), {"num_prefix_tokens": 3}),
    "heads_first": ((5, 4, 300, 32), (300, 2), (2, 1, 16), {"head_dim_first": True}),
    "queries_of_a_batch": ((300, 4, 64), (5, 300, 2), (2, 4, 32), {}),
}


def operands(problem, dtype, seed=0):
    shape, position_shape, (axes, heads, pairs), _ = PROBLEMS[problem]
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        random_embeddings(shape, dtype, seed),
        random_positions(position_shape, narrow, 300.0, seed + 1),
        random_freqs(axes, heads, pairs, narrow, seed + 2),
    )


def rotation_and_gradients(x, positions, freqs, settings) -> tuple[torch.Tensor, ...]:
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in (x, positions, freqs)]
    y = apply_rope(*inputs, **settings)
    grad = random_embeddings(y.shape, y.dtype, seed=9)
    return y.detach(), *torch.autograd.grad(y, [t for t in inputs if t.requires_grad], grad)


def rotation_by_angles(dtype) -> tuple[torch.Tensor, ...]:
    x, grad = (random_embeddings((60, 70, 2, 34), dtype, seed) for seed in (1, 2))
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    angles = random_positions((1, 70, 2, 17), narrow, 50.0, seed=3)
    return rotate_embeddings(x, angles), *rotate_embeddings_backward(grad, x, angles, needs_autograd=False)


def module_forward_and_backward(dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rope = RoPEEncodingND(2, 192, 6)
    query = random_embeddings((3, 20, 15, 192), dtype, seed=1).requires_grad_()
    y = rope(query, RoPEEncodingND.position_grid(query.shape))
    return y.detach(), *torch.autograd.grad(
        y, [query, *rope.freqs], random_embeddings(y.shape, dtype, seed=2)
    )


def angles(dtype) -> tuple[torch.Tensor, ...]:
    positions = random_positions((90, 50, 2), torch.float64, 1e4, seed=1)
    return (calculate_rope(positions, random_freqs(2, 4, 16, dtype, seed=2)[:, None]),)


def run_of(problem) -> Callable[[torch.dtype], tuple[torch.Tensor, ...]]:
    return lambda dtype: rotation_and_gradients(*operands(problem, dtype), PROBLEMS[problem][3])


RUNS = {problem: run_of(problem) for problem in PROBLEMS}
RUNS |= {"given_angles": rotation_by_angles, "module": module_forward_and_backward, "angles": angles}


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_same(results, expected):
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert same_bits(result, wanted)


@functools.cache
def with_one_thread(run, dtype, instruction_set):
    """What other runs are compared with; called while that instruction set and one thread are in use."""
    assert torch.get_num_threads() == 1
    return RUNS[run](dtype)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_threads_change_no_bit(set_threads, dtype, run, threads):
    set_threads(1)
    expected = with_one_thread(run, dtype, None)
    set_threads(threads)
    assert_same(RUNS[run](dtype), expected)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_instruction_sets_change_no_bit(set_threads, instruction_set, dtype, run):
    set_threads(1)
    _C.force_instruction_set(INSTRUCTION_SETS[-1])
    expected = with_one_thread(run, dtype, INSTRUCTION_SETS[-1])
    _C.force_instruction_set(instruction_set)
    assert_same(RUNS[run](dtype), expected)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_writing_past_the_caches_changes_no_bit(set_threads, dtype, run):
    set_threads(1)
    expected = with_one_thread(run, dtype, None)
    set_threads(8)
    try:
        _C.stream_from(0)
        assert_same(RUNS[run](dtype), expected)
    finally:
        _C.stream_from(None)


@given(call=calls(half_dims=(1, 3, 8, 17, 32, 33), extents=(1.0, 1000.0, 1e8)))
def test_instruction_sets_and_caches_change_no_bit_of_any_call(call):
    results = []
    try:
        for instruction_set, stream_from in itertools.product(INSTRUCTION_SETS, (None, 0)):
            _C.force_instruction_set(instruction_set)
            _C.stream_from(stream_from)
            results.append(rotation_and_gradients(call.x, call.positions, call.freqs, call.settings))
    finally:
        _C.force_instruction_set(None)
        _C.stream_from(None)
    for others in results[1:]:
        assert_same(others, results[0])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_runs_change_no_bit(set_threads, dtype, run):
    set_threads(8)
    expected = RUNS[run](dtype)
    for _ in range(3):
        assert_same(RUNS[run](dtype), expected)


# ---- batches

# through the float32 path, the float64 path and the C library's reduction, for several reasons each
MIXED_POSITIONS = [0.0, 0.5, 17.25, -3.0, 2.0**20, 3e6, -1.5e7, 1e12, 1e30, 2.0**21, 0.1, -7.75]


def mixed_tokens(dtype, tokens):
    """x [3, tokens, 2, 34], positions [tokens, 2] of all sizes in no order, freqs, and a gradient."""
    positions = torch.tensor(MIXED_POSITIONS).repeat(tokens // len(MIXED_POSITIONS) + 1)[:tokens]
    positions = torch.stack((positions, positions.roll(5)), -1)
    x, grad = (random_embeddings((3, tokens, 2, 34), dtype, seed) for seed in (1, 2))
    return x, positions, random_freqs(2, 2, 17, torch.float32, seed=3), grad


def rotation_and_gradient(x, positions, freqs, grad, layout):
    x = x.detach().requires_grad_()
    y = apply_rope(x, positions, freqs, layout=layout)
    return y.detach(), *torch.autograd.grad(y, x, grad)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(instruction_set, dtype, layout):
    x, positions, freqs, grad = mixed_tokens(dtype, 50)
    together = rotation_and_gradient(x, positions, freqs, grad, layout)
    for n in range(50):
        one = slice(n, n + 1)
        alone = rotation_and_gradient(x[:, one], positions[one], freqs, grad[:, one], layout)
        assert_same(alone, [t[:, one] for t in together])
        by_itself = rotation_and_gradient(x[1, n], positions[n], freqs, grad[1, n], layout)
        assert_same(by_itself, [t[1, n] for t in together])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_a_token_has_the_same_bits_at_every_index_of_every_batch(instruction_set, dtype, layout):
    x, positions, freqs, grad = mixed_tokens(dtype, 50)
    together = rotation_and_gradient(x, positions, freqs, grad, layout)
    for start, stop, step in ((0, 7, 1), (3, 50, 1), (1, 50, 2), (48, 50, 1), (0, 50, 9)):
        some = slice(start, stop, step)
        apart = rotation_and_gradient(x[:, some], positions[some], freqs, grad[:, some], layout)
        assert_same(apart, [t[:, some] for t in together])


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_other_batch_entries_change_no_bit(instruction_set, dtype):
    x, positions, freqs, grad = mixed_tokens(dtype, 5)
    once = rotation_and_gradient(x, positions, freqs, grad, "interleaved")
    many = [t.repeat(200, 1, 1, 1) for t in (x, grad)]
    often = rotation_and_gradient(many[0], positions, freqs, many[1], "interleaved")
    assert_same(often, [t.repeat(200, 1, 1, 1) for t in once])
    own = positions.repeat(200, 1, 1).repeat_interleave(3, 0)
    assert_same(rotation_and_gradient(many[0], own, freqs, many[1], "interleaved"), often)


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_a_head_alone_has_the_bits_it_has_among_others(instruction_set, dtype):
    x, positions, freqs, grad = mixed_tokens(dtype, 24)
    # large positions take the arithmetic that the largest frequency of all heads needs
    positions = positions.clamp(-1000, 1000)
    together = rotation_and_gradient(x, positions, freqs, grad, "interleaved")
    for h in range(2):
        one = slice(h, h + 1)
        alone = rotation_and_gradient(x[:, :, one], positions, freqs[:, one], grad[:, :, one], "interleaved")
        assert_same(alone, [t[:, :, one] for t in together])


@pytest.mark.parametrize("memory", MEMORY_KINDS)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_the_place_in_memory_changes_no_bit(instruction_set, dtype, layout, memory):
    x, positions, freqs, grad = mixed_tokens(dtype, 24)
    x, grad = in_memory(x, memory), in_memory(grad, memory)
    expected = rotation_and_gradients(x.clone(), positions.clone(), freqs, {"layout": layout})
    elsewhere = in_memory(positions, memory if memory not in ("expanded", "flipped") else "columns")
    results = rotation_and_gradients(x, elsewhere, in_memory(freqs, "reversed_dims"), {"layout": layout})
    assert_same(results[:2], expected[:2])
    dense = grad.clone(memory_format=torch.contiguous_format)
    assert_same(
        rotation_and_gradient(x, positions, freqs, grad, layout),
        rotation_and_gradient(x.clone(), positions, freqs, dense, layout),
    )


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
def test_in_place_and_packed_give_the_same_bits(set_threads, instruction_set, dtype):
    x, positions, freqs, _ = mixed_tokens(dtype, 50)
    set_threads(1)
    expected = apply_rope(x, positions, freqs)
    set_threads(3)
    packed = x[:, :, None].repeat(1, 1, 3, 1, 1)
    apply_rope_qkv_(packed, positions, freqs)
    assert_same(packed.unbind(2), (expected, expected, x))
    assert same_bits(apply_rope_(x, positions, freqs), expected)
