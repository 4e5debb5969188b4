"""What a build says about itself, and what it says where it can't work."""

import re
import subprocess
import sys
import textwrap

import pytest
import torch

import nd_rotary_encodings
from nd_rotary_encodings import _C, build_info

KEYS = {
    "version",
    "torch",
    "torch_abi",
    "compiler",
    "instruction_sets_built",
    "instruction_set",
    "threads",
    "cpu",
    "cuda",
    "other_devices",
}


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_keys_and_types():
    info = build_info()
    assert info.keys() >= KEYS
    assert isinstance(info["threads"], int)
    assert all(isinstance(name, str) for name in info["instruction_sets_built"])
    assert all(
        isinstance(info[key], str) and info[key] for key in KEYS - {"threads", "instruction_sets_built"}
    )


def test_torch_and_its_abi_are_those_of_this_process():
    info = build_info()
    assert info["torch"] == torch.__version__
    assert info["threads"] == torch.get_num_threads()
    major, minor = re.match(r"(\d+)\.(\d+)", torch.__version__).groups()
    assert info["torch_abi"].startswith(f"{major}.{minor}.")


def test_version_is_that_of_the_package():
    assert build_info()["version"] == nd_rotary_encodings.__version__


def test_compiler_and_devices_are_named():
    info = build_info()
    assert re.match(r"(GCC|Clang) \d", info["compiler"])
    assert info["cpu"] == "C kernels"
    assert "plain PyTorch" in info["other_devices"]


def test_instruction_set_in_use_is_the_best_that_this_machine_has():
    usable = [name for name, works in _C.build_info()["instruction_sets"] if works]
    info = build_info()
    assert info["instruction_set"] == usable[0]
    assert info["instruction_sets_built"] == [name for name, _ in _C.build_info()["instruction_sets"]]
    # the one that asks nothing of the machine comes last
    assert info["instruction_sets_built"][-1] in ("baseline", "neon")


def test_forced_instruction_set_shows_until_it_is_released():
    usable = [name for name, works in _C.build_info()["instruction_sets"] if works]
    try:
        for name in usable:
            _C.force_instruction_set(name)
            assert build_info()["instruction_set"] == name
    finally:
        _C.force_instruction_set(None)
    assert build_info()["instruction_set"] == usable[0]


def test_unknown_instruction_set_is_refused_and_changes_nothing():
    before = build_info()["instruction_set"]
    with pytest.raises(ValueError, match="no instruction set 'sse9'"):
        _C.force_instruction_set("sse9")
    unusable = [name for name, works in _C.build_info()["instruction_sets"] if not works]
    for name in unusable:
        with pytest.raises(ValueError, match="no instruction set"):
            _C.force_instruction_set(name)
    with pytest.raises(TypeError):
        _C.force_instruction_set(3)
    assert build_info()["instruction_set"] == before


def test_module_on_the_command_line_prints_every_key():
    result = run("-m", "nd_rotary_encodings")
    assert result.returncode == 0, result.stderr
    printed = dict(re.split(r":\s+", line, maxsplit=1) for line in result.stdout.splitlines())
    info = build_info()
    assert printed.keys() == info.keys()
    assert printed["torch"] == torch.__version__
    assert printed["instruction_sets_built"] == ", ".join(info["instruction_sets_built"])


IMPORT_BY_PATH = """
    import importlib.machinery, importlib.util, sys
    loader = importlib.machinery.ExtensionFileLoader("_C", sys.argv[1])
    spec = importlib.util.spec_from_file_location("_C", sys.argv[1], loader=loader)
    try:
        loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError as error:
        assert "torch" not in sys.modules
        print(error)
    else:
        sys.exit("it was imported without torch")
"""


def test_extension_without_torch_says_to_import_it():
    result = run("-c", textwrap.dedent(IMPORT_BY_PATH), _C.__file__)
    assert result.returncode == 0, result.stderr
    assert "import torch first" in result.stdout


def test_package_without_torch_says_to_install_it():
    code = """
        import sys
        sys.modules["torch"] = None  # what Python leaves where an import is impossible
        try:
            import nd_rotary_encodings
        except ImportError as error:
            print(error)
    """
    result = run("-c", textwrap.dedent(code))
    assert "pip install 'torch>=2.10'" in result.stdout, result.stderr


def test_extension_may_be_imported_twice():
    """Kernels are registered once per process; a second registration would be PyTorch's error."""
    code = """
        import sys, torch, nd_rotary_encodings
        before = sys.modules.pop("nd_rotary_encodings._C")
        del nd_rotary_encodings._C
        from nd_rotary_encodings import _C
        assert _C.live_handles() == 0
        x, position, freqs = torch.ones(1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1, 1)
        print(nd_rotary_encodings.apply_rope(x, position, freqs).tolist())
    """
    result = run("-c", textwrap.dedent(code))
    assert result.stdout.strip() == "[[[1.0, 1.0]]]", result.stderr
