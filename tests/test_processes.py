"""Threads of Python, forks, and workers of a DataLoader: nothing hangs, and all give the same bits.

Forks happen in processes of their own, so that one that hangs fails its test.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nd_rotary_encodings import RoPEEncodingND, apply_rope


def rotation_and_gradients(module, query, positions):
    query, positions = query.clone().requires_grad_(), positions.clone().requires_grad_()
    rotated = module(query, positions)
    return [rotated, *torch.autograd.grad(rotated, (query, positions, module.freqs[0]), rotated.detach())]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_of_python_may_share_a_module(two_threads):
    module, query, positions = RoPEEncodingND(2, 64, 4), torch.randn(4, 500, 64), torch.rand(500, 2) * 99
    expected = rotation_and_gradients(module, query, positions)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(rotation_and_gradients, module, query, positions) for _ in range(16)]
    for job in jobs:
        assert all(torch.equal(a, e) for a, e in zip(job.result(), expected, strict=True))


def test_threads_of_python_may_rotate_parts_of_one_tensor():
    freqs, positions, x = torch.randn(2, 4, 8), torch.rand(500, 2) * 99, torch.randn(8, 500, 4, 16)
    expected = apply_rope(x, positions, freqs)
    module = RoPEEncodingND(2, 64, 4, forward_only=True, inplace=True)
    module.load_state_dict({"freqs.0": freqs}, strict=False)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: module(part, positions), x.flatten(-2).unbind(0)))
    assert torch.equal(x, expected)


SCRIPT = """
import os
import signal
import warnings

# Python 3.12 and later say what is tested here
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

import torch
from nd_rotary_encodings import RoPEEncodingND, apply_rope_, calculate_rope, rotate_embeddings

torch.set_num_threads(2)
torch.manual_seed(0)
module = RoPEEncodingND(2, 64, 4)
query, positions = torch.randn(8, 2000, 64), torch.rand(2000, 2) * 99
grad, freqs = torch.randn(8, 2000, 64), module.freqs[0].detach()


def everything():
    x, p = query.detach().requires_grad_(), positions.detach().requires_grad_()
    rotated = module(x, p)
    gradients = torch.autograd.grad(rotated, (x, p, module.freqs[0]), grad)
    angles = calculate_rope(positions, freqs[:, None])
    by_angles = rotate_embeddings(query.unflatten(-1, (4, 16)), angles[None])
    return [t.detach().numpy().tobytes() for t in (rotated, *gradients, angles, by_angles)]


expected = everything()


def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(50)  # ends a child that hangs
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, function.__name__
"""


def run(script):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT + script + "\nprint('done')"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.stdout == "done\n", process.stderr


def test_a_child_forked_after_use_gives_the_same_bits():
    """With torch's threads in use, none of which the child has."""
    run("""
torch.randn(1_000_000).sin()


def all_the_same():
    return all(everything() == expected for _ in range(3))


def grandchild_too():
    in_child(all_the_same)
    return True


in_child(all_the_same)
in_child(all_the_same)
in_child(grandchild_too)
assert everything() == expected
""")


def test_a_forked_child_may_set_its_number_of_threads():
    run("""
def with_other_threads():
    for threads in (1, 3, 1):
        torch.set_num_threads(threads)
        if everything() != expected:
            return False
    return True


in_child(with_other_threads)
""")


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_forked_child_uses_several_threads():
    """Rather than one, with which a server that forks would be slow for ever and say nothing."""
    run("""
import threading
import time


def works_on_two_threads():
    most, deadline = 0, time.monotonic() + 30
    done = threading.Event()
    others = threading.Thread(target=lambda: [everything() for _ in iter(done.is_set, True)])
    others.start()
    while most < 4 and time.monotonic() < deadline:
        # this one, the one that calls, the one that works for it, and its helper
        most = max(most, len(os.listdir("/proc/self/task")))
    done.set()
    others.join()
    return most >= 4


in_child(works_on_two_threads)
""")


def test_shared_memory_is_shared_with_a_child():
    run("""
twin = RoPEEncodingND(2, 64, 4)
twin.load_state_dict(module.state_dict())
twin.share_memory()
assert all(t.is_shared() for t in twin.state_dict().values())
shared = query.clone().share_memory_()


def rotates_and_trains():
    apply_rope_(shared.unflatten(-1, (4, 16)), positions, twin.freqs[0].detach())
    twin.freqs[0].data.fill_(0)
    return True


in_child(rotates_and_trains)
assert shared.numpy().tobytes() == expected[0]
assert torch.equal(twin(query, positions), query)
""")


def test_workers_of_a_data_loader_give_the_same_bits():
    run("""
class Rotated(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return module(query[index : index + 2], positions).detach()


loader = torch.utils.data.DataLoader(
    Rotated(), batch_size=None, num_workers=2, multiprocessing_context="fork"
)
for index, rotated in enumerate(loader):
    assert torch.equal(rotated, module(query[index : index + 2], positions)), index
assert index == 3
""")
