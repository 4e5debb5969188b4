"""What this build is and what it will use here."""

from importlib.metadata import PackageNotFoundError, version

import torch

from . import _C

try:
    __version__ = version("nd-rotary-encodings")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"


def build_info() -> dict[str, str | int | list[str]]:
    """What this build is and what it will use here.

    Returns:
        A dict with ``version``; ``torch`` and ``torch_abi``, the version and the stable ABI of the torch
        found; ``compiler``; ``instruction_sets_built``, best first; ``instruction_set``, the one in use;
        ``threads``; ``cpu`` and ``cuda``, whether there are kernels or why not; ``other_devices``, what runs
        there.
    """
    info = _C.build_info()
    abi = info["torch_abi"]
    return {
        "version": __version__,
        "torch": torch.__version__,
        "torch_abi": f"{abi >> 56}.{abi >> 48 & 255}.{abi >> 40 & 255}",
        "compiler": info["compiler"],
        "instruction_sets_built": [name for name, _ in info["instruction_sets"]],
        "instruction_set": info["instruction_set"],
        "threads": torch.get_num_threads(),
        "cpu": "C kernels",
        "cuda": "no kernels in this version: plain PyTorch, which stores the angles",
        "other_devices": "plain PyTorch, which stores the angles",
    }
