"""A device that no kernel is for: a made-up one, with the operators of the CPU, in a process of its own."""

import subprocess
import sys

SCRIPT = """
import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nd_rotary_encodings import (
    RoPEEncodingND, apply_rope, apply_rope_, build_info, calculate_rope, rotate_embeddings
)

_setup_privateuseone_for_python_backend("toy")
called = set()


class Toy(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return cls._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="toy:0"
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op, types, args, kwargs=None):
        called.add(op.namespace)
        kwargs = kwargs or {}
        if op.namespace == "nd_rotary":  # as torch's dispatcher does for this device
            return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)

        def inner(value):
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return value.inner if isinstance(value, Toy) else value

        results = op(*pytree.tree_map(inner, args), **pytree.tree_map(inner, kwargs))
        if op._schema.is_mutable:
            return args[0]
        return pytree.tree_map(lambda t: Toy(t) if isinstance(t, torch.Tensor) else t, results)


def close(actual, expected, tolerance=1e-6):
    for a, e in zip(actual, expected, strict=True):
        assert a.device == torch.device("toy:0") and a.dtype == e.dtype and a.stride() == e.stride()
        torch.testing.assert_close(a.inner, e.detach(), rtol=tolerance, atol=tolerance)


def on_both(function, *tensors):
    return function(*(Toy(t.clone()) for t in tensors)), function(*(t.clone() for t in tensors))


def derivatives(x, positions, freqs, **settings):
    leaves = [t.requires_grad_() for t in (x, positions, freqs)]
    y = apply_rope(*leaves, **settings)
    first = torch.autograd.grad(y, leaves, y.detach() + 1, create_graph=True)
    second = torch.autograd.grad([g.sin().sum() for g in first], leaves)
    return [y, *first, *second]


torch.manual_seed(0)
module = RoPEEncodingND(2, 16, 2)
x, positions, freqs = torch.randn(3, 5, 2, 8), torch.rand(5, 2) * 9, torch.randn(2, 2, 4)
query, angles = x.flatten(-2), torch.randn(1, 5, 2, 4)

for settings in ({}, {"layout": "half", "inverse": True}):
    doubles = (x.double(), positions.double(), freqs.double())
    close(*on_both(lambda *t: derivatives(*t, **settings), *doubles), 1e-9)
close(*on_both(lambda q, p, f: functional_call(module, {"freqs.0": f}, (q, p, q)), query, positions, freqs))
close(*on_both(lambda *t: [apply_rope_(*t), t[0]], x, positions, freqs))
close(*on_both(lambda p, f: [calculate_rope(p, f[:, None])], positions, freqs))
close(*on_both(lambda e, a: [rotate_embeddings(e, a)], x, angles))
assert called == {"aten", "nd_rotary"}, called
try:
    apply_rope(Toy(x), positions, freqs)
except ValueError as error:
    assert "on one device, got toy:0, cpu and cpu" in str(error)
else:
    raise AssertionError("devices were mixed")
assert build_info()["other_devices"] == "plain PyTorch, which stores the angles"
print("done")
"""


def test_another_device_runs_the_definition_and_differentiates_it():
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout == "done\n", process.stderr
