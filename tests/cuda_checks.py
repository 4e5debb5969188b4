"""Checks of the CUDA kernels against the CPU's, which need torch alone: ``benchmarks/gpu_check.py`` runs them
on a device, and test_cuda.py on the emulated one, where tensors of "the device" are on the CPU.

Each takes a :class:`Device`. The CPU kernels are tested elsewhere and are the oracle here.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nd_rotary_encodings import (
    RoPEEncodingND,
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    rotate_embeddings,
    rotate_embeddings_backward,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PROBLEMS = {
    "many tokens": ((2, 700, 2, 32), (700, 2), (2, 2, 16), {}),
    "half split": ((2, 300, 2, 64), (300, 2), (2, 1, 32), {"layout": "half"}),
    "own positions": ((3, 80, 2, 32), (3, 80, 2), (2, 2, 16), {}),
    "one position": ((900, 1, 2, 16), (1, 2), (2, 2, 8), {}),
    "no token dim": ((900, 3, 16), (3,), (3, 1, 8), {"layout": "half"}),
    "tails": ((3, 90, 3, 19), (90, 1), (1, 3, 7), {"layout": 14, "rotary_offset": 3}),
    "blocks": ((3, 60, 3, 24), (60, 2), (2, 3, 12), {"layout": 6, "inverse": True}),
    "prefix": ((3, 43, 3, 32), (40, 2), (2, 3, 8), {"num_prefix_tokens": 3}),
    "heads first": ((2, 4, 100, 32), (100, 2), (2, 1, 16), {"head_dim_first": True}),
    "20 axes": ((2, 30, 2, 16), (30, 20), (20, 2, 8), {"layout": "half"}),
}


@dataclass
class Device:
    name: str  # "cuda", or "cpu" where it is emulated
    on_host: Callable[[], contextlib.AbstractContextManager]  # within it the CPU's kernels run

    @property
    def is_real(self) -> bool:
        return self.name != "cpu"

    def both(self, function, *inputs):
        """Results of the CPU's kernels, and of the device's moved to the CPU."""
        with self.on_host():
            wanted = function(*inputs)
        moved = [t.detach().to(self.name).requires_grad_(t.requires_grad) for t in inputs]
        results = function(*moved)
        assert all(result.device.type == self.name for result in results)
        return wanted, [result.cpu() for result in results]


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def assert_close(result: Tensor, wanted: Tensor, arithmetic: torch.dtype, scale: float = 0.0) -> None:
    """To some units of the arithmetic or of the rounding, on the scale of the largest or of ``scale``."""
    assert result.dtype == wanted.dtype and result.shape == wanted.shape
    if wanted.numel():
        scale = max(scale, float(wanted.double().abs().max()))
    eps = max(torch.finfo(wanted.dtype).eps, torch.finfo(arithmetic).eps)
    assert torch.allclose(result.double(), wanted.double(), rtol=0, atol=16 * eps * scale, equal_nan=True)


def narrow(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def operands(problem: str, dtype: torch.dtype) -> tuple[list[Tensor], dict]:
    shape, position_shape, freq_shape, settings = PROBLEMS[problem]
    torch.manual_seed(0)
    positions = (torch.rand(position_shape, dtype=torch.float64) * 600 - 300).to(narrow(dtype))
    freqs = (torch.rand(freq_shape, dtype=torch.float64) * 2 - 1).to(narrow(dtype))
    return [t.requires_grad_() for t in (torch.randn(shape).to(dtype), positions, freqs)], settings


def rotation_and_gradients(settings: dict):
    def run(*inputs):
        y = apply_rope(*inputs, **settings)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(y.shape, generator=generator).to(y)
        leaves = [t for t in inputs if t.requires_grad]
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    return run


def rotations_and_gradients(device: Device) -> None:
    """The bits of the CPU where nothing is summed; and the same bits twice."""
    for problem in PROBLEMS:
        for dtype in DTYPES:
            inputs, settings = operands(problem, dtype)
            wanted, results = device.both(rotation_and_gradients(settings), *inputs)
            assert same_bits(results[0], wanted[0]), (problem, dtype)
            for result, gradient in zip(results[1:], wanted[1:], strict=True):
                assert_close(result, gradient, narrow(dtype))
            _, again = device.both(rotation_and_gradients(settings), *inputs)
            assert all(same_bits(a, b) for a, b in zip(again, results, strict=True)), (problem, dtype)


def given_angles(device: Device) -> None:
    for dtype in DTYPES:
        for shape in ((1, 20, 2, 17), (40, 1, 1, 17), (40, 20, 2, 17), (1, 1, 2, 17)):
            torch.manual_seed(2)
            x, grad = torch.randn(2, 40, 20, 2, 34).to(dtype)
            angles = torch.randn(shape, dtype=narrow(dtype)) * 50

            def run(x, grad, angles):
                return rotate_embeddings(x, angles), *rotate_embeddings_backward(
                    grad, x, angles, needs_autograd=False
                )

            wanted, results = device.both(run, x, grad, angles)
            assert same_bits(results[0], wanted[0]) and same_bits(results[1], wanted[1])
            assert_close(results[2], wanted[2], narrow(dtype))


def every_kind_of_position(device: Device) -> None:
    """Integers, half types, and angles beyond the fast path."""
    torch.manual_seed(3)
    x, freqs = torch.randn(64, 2, 16), torch.rand(1, 2, 8)
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
    ):
        positions = torch.arange(64).sub(20 * (dtype != torch.uint8)).to(dtype)[:, None]
        wanted, results = device.both(lambda *t: [apply_rope(*t)], x, positions, freqs)
        assert same_bits(results[0], wanted[0]), dtype
    large = torch.logspace(3, 18, 64, dtype=torch.float64)[:, None]
    for positions in (large, large.float(), large.long(), large.long() + 1):
        for dtype in (torch.float32, torch.float64):
            wanted, results = device.both(
                lambda *t: [apply_rope(*t)], x.to(dtype), positions, freqs.to(dtype)
            )
            assert_close(results[0], wanted[0], dtype)
            wanted, results = device.both(
                lambda *t: [calculate_rope(*t)], positions, freqs[:, None].to(dtype)
            )
            assert_close(results[0], wanted[0], dtype)


def memory_layouts(device: Device) -> None:
    torch.manual_seed(4)
    for dtype in DTYPES:
        positions, freqs = torch.rand(50, 2) * 99, torch.rand(2, 4, 8)
        whole = torch.randn(2, 50, 3, 4, 18).to(dtype)

        def run(whole, positions, freqs):
            views = [
                whole[:, :, 1, :, :16],
                whole[:, :, 1, :, 1:17],
                whole.transpose(1, 3)[..., :16].transpose(1, 3)[:, :, 0],
                whole[:, :, 2, :, :16].flip(0),
                whole[:1, :, 0, :, :16].expand(3, -1, -1, -1),
                whole.repeat(1, 1, 1, 1, 2)[..., 0, :, ::2][..., :16],
            ]
            results = [apply_rope(view, positions, freqs) for view in views]
            results += [apply_rope(view, positions, freqs, layout="half") for view in views]
            mine = whole.clone()
            apply_rope_(mine[:, :, 1, :, :16], positions, freqs)
            qkv = whole[..., :16].contiguous()
            return *results, mine, apply_rope_qkv_(qkv, positions, freqs)

        wanted, results = device.both(run, whole, positions, freqs)
        assert all(same_bits(a, b) for a, b in zip(results, wanted, strict=True)), dtype


def modules(device: Device) -> None:
    for options in ({}, {"share_heads": True}):
        torch.manual_seed(5)
        module = RoPEEncodingND(2, 48, 4, **options)
        query, key = torch.randn(2, 2, 5, 7, 48)
        positions = RoPEEncodingND.position_grid(query.shape)

        def run(query, key, positions, *freqs, module=module):
            copy = RoPEEncodingND(2, 48, 4, share_heads=module.share_heads).to(query.device)
            copy.load_state_dict(module.state_dict())
            query, key = query.clone().requires_grad_(), key.clone().requires_grad_()
            q, k = copy(query, positions, key)
            return q.detach(), k.detach(), *torch.autograd.grad((q * q * k).sum(), [query, key, *copy.freqs])

        wanted, results = device.both(run, query, key, positions)
        for result, expected in zip(results, wanted, strict=True):
            assert_close(result, expected, torch.float32)


def large_and_empty_sizes(device: Device) -> None:
    freqs = torch.rand(1, 1, 1)
    for shape, tokens in (((65537, 1, 2), 65537), ((65536, 1, 1, 2), 1), ((1, 65536, 2), 1)):
        wanted, results = device.both(
            lambda *t: [apply_rope(*t)], torch.randn(shape), torch.arange(tokens)[:, None], freqs
        )
        assert same_bits(results[0], wanted[0]), shape
    for shape in ((0, 2, 4), (3, 0, 4), (3, 2, 0)):
        x = torch.zeros(shape, device=device.name, requires_grad=True)
        positions = torch.zeros(shape[0], 2, device=device.name, requires_grad=True)
        freqs = torch.ones(2, shape[1], shape[2] // 2, device=device.name, requires_grad=True)
        y = apply_rope(x, positions, freqs)
        for gradient in torch.autograd.grad(y, [x, positions, freqs], torch.ones_like(y)):
            assert float(gradient.abs().sum()) == 0
    assert float(torch.ones(3, device=device.name).sum()) == 3  # no error was left behind


# ---- what only a device can show


def more_than_2_to_the_31_elements(device: Device) -> None:
    tokens = 2**21 + 1
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        return
    x = torch.ones(1, tokens, 1, 1024, dtype=torch.bfloat16, device=device.name, requires_grad=True)
    positions, freqs = (
        torch.arange(tokens, device=device.name)[:, None],
        torch.rand(1, 1, 512, device=device.name),
    )
    y = apply_rope(x, positions, freqs)
    (grad,) = torch.autograd.grad(y, [x], y.detach())
    with device.on_host():
        wanted = apply_rope(torch.ones(3, 1, 1024, dtype=torch.bfloat16), positions[-3:].cpu(), freqs.cpu())
    assert same_bits(y[0, -3:].detach().cpu(), wanted)
    assert float((grad[0, -3:].float() - 1).abs().max()) < 0.02


def side_streams(device: Device) -> None:
    x, positions, freqs = torch.randn(4096, 8, 64), torch.rand(4096, 2), torch.rand(2, 8, 32)
    with device.on_host():
        wanted = apply_rope(x, positions, freqs)
    x, positions, freqs = (t.to(device.name) for t in (x, positions, freqs))
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        y = apply_rope(late, positions, freqs)
    stream.synchronize()
    assert same_bits(y.cpu(), wanted)


def graphs(device: Device) -> None:
    """Forward and backward in a graph, which is replayed on other values."""
    inputs, settings = operands("many tokens", torch.float32)
    run = rotation_and_gradients(settings)
    with device.on_host():
        wanted = run(*inputs)
    static = [t.detach().to(device.name).requires_grad_() for t in inputs]
    grad = torch.randn(wanted[0].shape, generator=torch.Generator().manual_seed(1)).to(device.name)
    values = [t.detach().clone() for t in static]

    def step():
        y = apply_rope(*static, **settings)
        return y.detach(), *torch.autograd.grad(y, static, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    for t in static:
        t.detach().zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for t, value in zip(static, values, strict=True):
        t.detach().copy_(value)
    graph.replay()
    assert same_bits(results[0].cpu(), wanted[0])
    for result, expected in zip(results[1:], wanted[1:], strict=True):
        assert_close(result.cpu(), expected, torch.float32)


def capture_as_the_first_call(device: Device) -> None:
    """The kernels of a device may be loaded while a graph is captured. Needs a process of its own."""
    x, positions, freqs = torch.randn(64, 2, 8), torch.rand(64, 1), torch.rand(1, 2, 4)
    moved = [t.to(device.name) for t in (x, positions, freqs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = apply_rope(*moved)
    graph.replay()
    with device.on_host():
        assert same_bits(y.cpu(), apply_rope(x, positions, freqs))


def no_synchronization_and_no_memory_but_results(device: Device) -> None:
    x, positions, freqs = (
        t.to(device.name) for t in (torch.randn(4, 4096, 8, 64), torch.rand(4096, 2), torch.rand(2, 8, 32))
    )
    for t in (x, positions, freqs):
        t.requires_grad_()
    grad = torch.randn_like(x)
    apply_rope(x, positions, freqs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = apply_rope(x, positions, freqs)
        assert torch.cuda.max_memory_allocated() - before <= x.numel() * 4 + 4096
        torch.autograd.grad(y, [x, positions, freqs], grad)
        # the gradient, and partial sums that are a small part of it
        assert torch.cuda.max_memory_allocated() - before <= 2.15 * x.numel() * 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mixed_devices_are_errors(device: Device) -> None:
    x, positions, freqs = torch.randn(3, 2, 4), torch.rand(3, 1), torch.rand(1, 2, 2)
    for moved in range(3):
        mixed = [t.to(device.name) if i == moved else t for i, t in enumerate((x, positions, freqs))]
        try:
            apply_rope(*mixed)
        except ValueError as error:
            assert "on one device" in str(error)
        else:
            raise AssertionError("no error")


def compiled_is_eager(device: Device) -> None:
    inputs, _ = operands("many tokens", torch.float32)
    inputs = [t.detach().to(device.name).requires_grad_() for t in inputs]
    grad = torch.randn_like(inputs[0])

    def run(rotate):
        y = rotate(*inputs)
        return y, *torch.autograd.grad(y, inputs, grad)

    eager, compiled = run(apply_rope), run(torch.compile(lambda *t: apply_rope(*t), fullgraph=True))
    assert all(same_bits(a, b) for a, b in zip(eager, compiled, strict=True))


def every_device(device: Device) -> None:
    x, positions, freqs = torch.randn(64, 2, 8), torch.rand(64, 1), torch.rand(1, 2, 4)
    with device.on_host():
        wanted = apply_rope(x, positions, freqs)
    for index in range(torch.cuda.device_count()):
        y = apply_rope(*(t.to(f"cuda:{index}") for t in (x, positions, freqs)))
        assert y.device.index == index and same_bits(y.cpu(), wanted)
        assert torch.cuda.current_device() == 0


EVERYWHERE = (
    rotations_and_gradients,
    given_angles,
    every_kind_of_position,
    memory_layouts,
    modules,
    large_and_empty_sizes,
)
ON_DEVICES = (
    more_than_2_to_the_31_elements,
    side_streams,
    graphs,
    no_synchronization_and_no_memory_but_results,
    mixed_devices_are_errors,
    every_device,
    compiled_is_eager,
)
