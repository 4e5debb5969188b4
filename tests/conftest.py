"""Settings, fixtures and small tools of all tests."""

import os

import hypothesis
import pytest
import torch

from nd_rotary_encodings import _C

# fixtures of function scope serve all examples of a test alike: the instruction set is forced once
COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture]}
hypothesis.settings.register_profile("dev", max_examples=60, **COMMON)
hypothesis.settings.register_profile("ci", max_examples=100, derandomize=True, **COMMON)
hypothesis.settings.register_profile("deep", max_examples=3000, **COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))

INSTRUCTION_SETS = [name for name, usable in _C.build_info()["instruction_sets"] if usable]

# tests/cuda_emulation as a library: everything then runs on the CUDA route, which has no instruction sets
EMULATION = os.environ.get("ND_ROTARY_EMULATION")
if EMULATION:
    _C.emulate_cuda(EMULATION)
    INSTRUCTION_SETS = INSTRUCTION_SETS[:1]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    """Runs the test once with the kernels of every instruction set that this machine can run."""
    _C.force_instruction_set(request.param)
    yield request.param
    _C.force_instruction_set(None)


@pytest.fixture(autouse=True)
def no_tensor_handle_leaks():
    """Each handle that a kernel takes or makes must be given back, also where it raises."""
    yield
    assert _C.live_handles() == 0


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(tensor):
    return tensor.detach().requires_grad_()


def shape_of(tensor):
    """Shape, strides where they mean something, dtype."""
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), steps if tensor.numel() else [], tensor.dtype


def saved_storages(call):
    """Sizes by address of the storages that autograd saves during a call, and its result."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return saved, result
