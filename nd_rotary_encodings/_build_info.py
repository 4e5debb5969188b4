"""What this build is and what it will use here."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import _C

try:
    __version__ = version("nd-rotary-encodings")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"


def _nvrtc() -> str | None:
    """The NVRTC that torch's CUDA wheels bring, of the CUDA version that torch was built with."""
    major = (torch.version.cuda or "").split(".")[0]
    packages = Path(torch.__file__).parents[1]
    libraries = sorted(packages.glob(f"nvidia/*/lib/libnvrtc.so.{major}*")) if major else []
    return str(libraries[0]) if libraries else f"libnvrtc.so.{major}" if major else None


_C.use_nvrtc(_nvrtc())


def _cuda(built: str | None, registered: bool) -> str:
    plain = "plain PyTorch, which stores the angles"
    if built is None:
        return f"no kernels in this build: {plain}"
    if not registered:
        why = "torch was built without CUDA" if torch.version.cuda is None else "ND_ROTARY_CUDA=0"
        return f"kernels ({built}) not in use, as {why}: {plain}"
    if not torch.cuda.is_available():
        return f"kernels ({built}), but torch finds no device"
    error = _C.prepare_cuda(torch.cuda.current_device())
    return f"kernels ({built})" if error is None else f"kernels, but calls raise: {error}"


def build_info() -> dict[str, str | int | list[str]]:
    """What this build is and what it will use here.

    Returns:
        A dict with ``version``; ``torch`` and ``torch_abi``, the version and the stable ABI of the torch
        found; ``compiler``; ``instruction_sets_built``, best first; ``instruction_set``, the one in use;
        ``threads``; ``cpu`` and ``cuda``, whether there are kernels or why not, for which the kernels of the
        current CUDA device are made ready; ``other_devices``, what runs there.
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
        "cuda": _cuda(info["cuda_built"], info["cuda_registered"]),
        "other_devices": "plain PyTorch, which stores the angles",
    }
