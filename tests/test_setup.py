"""What setup.py makes of the CUDA kernels, with and without nvcc."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA kernels are built on Linux alone")

ALL = "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120 compute_80"
# knows the architectures in KNOWN, and writes its arguments in place of a fatbin
NVCC = """#!/bin/sh
case "$1" in
--list-gpu-arch) for number in $KNOWN; do echo compute_$number; done ;;
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
*) while [ "$1" != -o ]; do arguments="$arguments $1"; shift; done; echo "$arguments" > "$2" ;;
esac
"""


@pytest.fixture
def setup(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    for variable in ("ND_ROTARY_CUDA", "ND_ROTARY_WERROR", "ND_ROTARY_SANITIZE", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    names = {"__file__": "setup.py", "__name__": "setup"}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), names)
    return SimpleNamespace(names=names, build_cuda=names["build_cuda"])


@pytest.fixture
def nvcc(setup, monkeypatch, tmp_path):
    path = tmp_path / "nvcc"
    path.write_text(NVCC)
    path.chmod(0o755)
    monkeypatch.setenv("KNOWN", "75 80 86 87 89 90 100 120")
    monkeypatch.setitem(setup.names, "find_nvcc", lambda: str(path))


@pytest.fixture
def no_nvcc(setup, monkeypatch):
    monkeypatch.setitem(setup.names, "find_nvcc", lambda: None)


def contents(macro: str) -> str:
    return Path(macro.strip('"')).read_text()


def test_nvcc_compiles_all_architectures_and_ptx_of_the_lowest(setup, nvcc, tmp_path):
    macros = dict(setup.build_cuda(str(tmp_path / "out")))
    assert macros.keys() == {"ROPE_CUDA_IMAGE", "ROPE_CUDA_ARCHITECTURES"}
    assert macros["ROPE_CUDA_ARCHITECTURES"] == f'"{ALL}"'
    arguments = contents(macros["ROPE_CUDA_IMAGE"]).split()
    assert {"--fatbin", "--fmad=false"} <= set(arguments)
    assert not any("fast" in argument for argument in arguments)
    assert "-gencode=arch=compute_80,code=compute_80" in arguments
    assert "-gencode=arch=compute_120,code=sm_120" in arguments


def test_older_nvcc_leaves_out_what_it_does_not_know(setup, nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWN", "75 80 86 89 90")
    macros = dict(setup.build_cuda(str(tmp_path)))
    assert macros["ROPE_CUDA_ARCHITECTURES"] == '"sm_80 sm_86 sm_89 sm_90 compute_80"'


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("9.0", "sm_90"),
        ("8.6 9.0a+PTX", "sm_86 sm_90 compute_90"),
        ("12.0;8.0,", "sm_80 sm_120"),
    ],
)
def test_list_of_architectures_is_that_of_torch(setup, nvcc, tmp_path, monkeypatch, listed, names):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert dict(setup.build_cuda(str(tmp_path)))["ROPE_CUDA_ARCHITECTURES"] == f'"{names}"'


@pytest.mark.parametrize(
    ("listed", "message"), [("Hopper", "got 'Hopper'"), ("3.5", "has no architecture 3.5")]
)
def test_architectures_that_cannot_be_built_stop_the_build(
    setup, nvcc, tmp_path, monkeypatch, listed, message
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SystemExit, match=message):
        setup.build_cuda(str(tmp_path))


def test_without_nvcc_the_source_is_embedded_whole(setup, no_nvcc, tmp_path):
    ((macro, path),) = setup.build_cuda(str(tmp_path))
    assert macro == "ROPE_CUDA_SOURCE"
    parts = contents(path).split("\0")
    files = dict(zip(parts[:-1:2], parts[1::2], strict=True))
    assert next(iter(files)) == "kernels.cu"
    included = {
        line.split('"')[1] for text in files.values() for line in text.splitlines() if '#include "' in line
    }
    assert included <= files.keys()


def test_wishes_for_cuda(setup, no_nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("ND_ROTARY_CUDA", "0")
    assert setup.build_cuda(str(tmp_path)) == []
    monkeypatch.setenv("ND_ROTARY_CUDA", "1")
    with pytest.raises(SystemExit, match="ND_ROTARY_CUDA=1, but no nvcc was found"):
        setup.build_cuda(str(tmp_path))
    monkeypatch.setenv("ND_ROTARY_CUDA", "yes")
    with pytest.raises(SystemExit, match="expected 0 or 1, got 'yes'"):
        setup.build_cuda(str(tmp_path))


def test_binary_needs_no_library_of_cuda():
    from nd_rotary_encodings import _C

    needed = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True, check=True).stdout
    assert not any(name in needed for name in ("libcuda", "libcudart", "libnvrtc", "libtorch"))
    assert os.path.getsize(_C.__file__) < 4 * 2**20
