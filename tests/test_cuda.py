"""The CUDA kernels and their host code without a device: tests/cuda_emulation stands in for the driver, and
tensors on the CPU take CUDA's way. The other test files run on it, too: ``make test-cuda``."""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import cuda_checks
import pytest
import torch
from cuda_checks import assert_close, narrow, operands, rotation_and_gradients
from hypothesis import given
from strategies import (
    EMBEDDING_DTYPES,
    assert_rotated,
    calls,
    exact_rotation,
    name,
    random_embeddings,
    random_freqs,
    random_positions,
    same_bits,
)

from nd_rotary_encodings import (
    _C,
    apply_rope,
    apply_rope_,
    build_info,
)

ROOT = Path(__file__).parents[1]
CSRC, EMULATION = ROOT / "csrc", ROOT / "tests" / "cuda_emulation"
BUILD = ROOT / "build" / "tests_c" / "cuda"

# what gcc and make need; elsewhere the emulation can't be built
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the emulation is built with GCC and make on Linux"
)


class Emulation:
    """The emulated driver: ``set`` and ``get`` its settings (emulation.c), ``on`` sends CPU tensors to it."""

    def __init__(self, path: Path):
        self.path, self._library = str(path), ctypes.CDLL(str(path))
        self._library.emulation_get.restype = ctypes.c_long

    def set(self, **settings: int) -> None:
        for key, value in settings.items():
            self._library.emulation_set(key.encode(), ctypes.c_long(value))

    def get(self, key: str) -> int:
        return self._library.emulation_get(key.encode())

    def reset(self) -> None:
        self._library.emulation_reset()

    def on(self) -> None:
        _C.emulate_cuda(self.path)

    def off(self) -> None:
        _C.emulate_cuda(os.environ.get("ND_ROTARY_EMULATION"))

    def run(self, function, *arguments, **settings):
        """On the emulated device, which was asked for anew; must have launched a kernel."""
        self.set(**settings)
        self.on()
        before = self.get("launches")
        try:
            return function(*arguments)
        finally:
            self.off()
            assert self.get("depth") == 0
            assert self.get("launches") > before or settings.keys() & {
                "fail_init",
                "fail_load",
                "fail_launch",
            }


@pytest.fixture(scope="session")
def emulation_library():
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of pytest-xdist
        target = os.path.relpath(BUILD / "libemulation.so", ROOT / "tests" / "c")
        subprocess.run(["make", "-s", "-C", ROOT / "tests" / "c", target], check=True)
    return Emulation(BUILD / "libemulation.so")


@pytest.fixture
def emulation(emulation_library):
    emulation_library.reset()
    yield emulation_library
    emulation_library.reset()
    emulation_library.off()


# ---- the same results as on the CPU


@pytest.mark.parametrize("check", cuda_checks.EVERYWHERE, ids=lambda check: check.__name__)
def test_checks_that_devices_must_pass(emulation, check):
    @contextlib.contextmanager
    def on_host():
        _C.emulate_cuda(None)
        yield
        emulation.on()

    emulation.on()
    check(cuda_checks.Device("cpu", on_host))
    assert emulation.get("launches") > 0


@given(calls())
def test_rotation_is_exact(emulation, call):
    rotated = emulation.run(lambda: call(apply_rope)) if call.x.numel() and call.positions.numel() else None
    if rotated is not None and rotated.numel():
        exact = exact_rotation(call.x, call.positions, call.freqs, **call.settings)
        assert_rotated(
            rotated, exact, call.freqs.shape[-1], call.settings["layout"], call.settings["rotary_offset"]
        )


@given(calls(extents=(0.0, 40.0), special=False))
def test_rotation_and_gradients_are_those_of_the_cpu(emulation, call):
    run = rotation_and_gradients(call.settings)
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in (call.x, call.positions, call.freqs)]
    wanted = run(*inputs)
    emulation.on()
    results = run(*inputs)
    emulation.off()
    # the text of the fast path is the same; beyond float32 the CPU takes float64, and CUDA integers
    held = call.x.dtype == torch.float64 or (
        call.freqs.dtype != torch.float64
        and torch.equal(call.positions.float().double(), call.positions.double())
    )
    assert not held or same_bits(results[0], wanted[0])
    # the rounding of the result is all that the backward sees of it; sums may cancel
    arithmetic = narrow(call.x.dtype) if held else call.x.dtype
    norms = float(wanted[0].double().square().sum())
    factors = [t.double().abs().max() for t in (call.positions, call.freqs) if t.numel()]
    for result, expected in zip(results, wanted, strict=True):
        assert_close(result, expected, arithmetic, norms * float(max(factors, default=0)))


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("problem", cuda_checks.PROBLEMS)
def test_order_of_blocks_and_threads_and_size_of_the_grid_change_no_bit(emulation, problem, dtype):
    inputs, settings = operands(problem, dtype)
    run = rotation_and_gradients(settings)
    wanted = emulation.run(run, *inputs)
    for order in ({"seed": 1}, {"seed": 2, "max_grid": 3}, {"max_grid": 1}):
        results = emulation.run(run, *inputs, **order)
        assert all(same_bits(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32], ids=name)
def test_angles_beyond_the_fast_path_are_reduced_exactly(emulation, dtype):
    values = [1e3, 1e7 + 0.1, 3e12, -7e15, 1e18, 2.0**62 + 2**12] + [1e30, -1e300] * (dtype != torch.int64)
    positions = torch.tensor(values, dtype=torch.float64).clamp(
        -3e38, 3e38 if dtype == torch.float32 else None
    )
    positions = positions.to(dtype)[:, None]
    freqs = torch.tensor([0.3, 1.0, 1e-3, 7.77], dtype=torch.float64).view(1, 1, 4)
    for embeddings in (torch.float64, torch.float32):
        x = random_embeddings((len(positions), 1, 8), embeddings, seed=0)
        rotated = emulation.run(apply_rope, x, positions, freqs.to(embeddings))
        assert_rotated(rotated, exact_rotation(x, positions, freqs.to(embeddings)), 4, "interleaved")


# ---- sizes and strides


@pytest.mark.parametrize("shape", [(65537, 1, 2), (1, 65536, 2), (1, 1, 131074)], ids=str)
def test_many_tokens_heads_or_channels(emulation, shape):
    tokens, heads, channels = shape
    x, positions = torch.randn(shape), torch.arange(tokens)[:, None]
    freqs = random_freqs(1, heads, channels // 2, torch.float32, seed=1)
    assert same_bits(emulation.run(apply_rope, x, positions, freqs), apply_rope(x, positions, freqs))


def test_batch_of_65536(emulation):
    x, positions, freqs = (
        torch.randn(65536, 1, 1, 4),
        torch.ones(1, 2),
        random_freqs(2, 1, 2, torch.float32, seed=1),
    )
    assert same_bits(emulation.run(apply_rope, x, positions, freqs), apply_rope(x, positions, freqs))


@pytest.mark.parametrize("where", ["tokens", "batch", "heads"])
def test_elements_more_than_2_to_the_31_apart(emulation, where):
    """Virtual memory alone: what is never touched takes no room."""
    apart = 2**31 + 8
    strides = {"tokens": (16, apart, 8), "batch": (apart, 16, 8), "heads": (32, 16, apart)}[where]
    sizes = {"tokens": (1, 2, 2), "batch": (2, 2, 2), "heads": (1, 2, 2)}[where]
    x = torch.empty(apart + 256, dtype=torch.bfloat16).as_strided((*sizes, 8), (*strides, 1))
    values = random_embeddings(x.shape, torch.bfloat16, seed=1)
    positions, freqs = (
        random_positions((2, 1), torch.float32, 9.0, 2),
        random_freqs(1, 2, 4, torch.float32, 3),
    )
    x.copy_(values)
    emulation.run(apply_rope_, x, positions, freqs)
    assert same_bits(x, apply_rope(values, positions, freqs))


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 0), (2, 0, 2, 4), (0, 3, 2, 4)], ids=str)
def test_sizes_of_zero(emulation, shape):
    x = torch.zeros(shape, requires_grad=True)
    positions = torch.zeros(shape[-3], 2, requires_grad=True)
    freqs = torch.ones(2, shape[-2], shape[-1] // 2, requires_grad=True)
    emulation.on()
    y = apply_rope(x, positions, freqs)
    gradients = torch.autograd.grad(y, [x, positions, freqs], torch.ones_like(y))
    emulation.off()
    assert y.shape == x.shape
    assert all((gradient == 0).all() for gradient in gradients)


def test_too_many_axes_are_an_error(emulation):
    x, positions, freqs = torch.randn(3, 1, 2), torch.randn(3, 400), torch.randn(400, 1, 1)
    with pytest.raises(RuntimeError, match="400 axes are too many for the CUDA kernels"):
        emulation.run(apply_rope, x, positions, freqs, fail_launch=0)


# ---- the host's part


def rotate_something():
    return apply_rope(torch.randn(3, 2, 8), torch.randn(3, 1), torch.randn(1, 2, 4))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"fail_init": 100}, r"CUDA driver: cuInit: CUDA_ERROR_NO_DEVICE \(as the test asked\)"),
        ({"fail_load": 209}, r"cuda:0 \(sm_90\) can't run the kernels of this build .*NO_BINARY_FOR_GPU"),
        ({"fail_launch": 719}, r"CUDA driver: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"),
        ({"devices": 0, "fail_load": 0}, "CUDA driver: cuDeviceGet"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_failures_of_the_driver_are_errors_that_name_the_function(emulation, setting, message):
    with pytest.raises(RuntimeError, match=message):
        emulation.run(rotate_something, **setting)
    emulation.reset()
    emulation.run(rotate_something)  # nothing sticks


def test_no_driver_is_an_error_that_says_so(emulation):
    _C.emulate_cuda("libnot-there.so.1")
    with pytest.raises(RuntimeError, match=r"no CUDA driver: libnot-there\.so"):
        rotate_something()
    _C.emulate_cuda("libm.so.6")
    with pytest.raises(RuntimeError, match="this CUDA driver is too old: it has no cuInit"):
        rotate_something()


def test_modules_load_where_captures_allow_it_and_once(emulation):
    emulation.set(unrelaxed_loads=0)
    emulation.run(rotate_something)
    assert emulation.get("unrelaxed_loads") == 0
    emulation.on()
    rotate_something()
    emulation.set(fail_load=209)
    rotate_something()
    emulation.off()


def test_prepare_tells_what_a_call_would_raise(emulation):
    emulation.on()
    assert _C.prepare_cuda(0) is None and _C.prepare_cuda(1) is None
    assert "cuDeviceGet" in _C.prepare_cuda(2)
    assert "cuda:4000 is beyond" in _C.prepare_cuda(4000)
    emulation.off()


def test_build_info_says_what_runs_on_cuda():
    text, built = build_info()["cuda"], _C.build_info()["cuda_built"]
    if torch.version.cuda is None:
        wanted = "no kernels in this build" if built is None else re.escape(f"kernels ({built}) not in use")
        assert re.match(wanted, text) and "plain PyTorch" in text
    else:
        assert built is None or text.startswith("kernels")


@pytest.mark.parametrize("works", [True, False])
def test_script_for_machines_with_a_gpu_runs_its_checks_and_tells_failures(emulation, works):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", "--stage", "small", "--emulated"]
    library = emulation.path if works else "libnot-there.so"
    result = subprocess.run([*command, library], capture_output=True, text=True, timeout=120)
    assert re.findall(r"^(\w+) (\w+)", result.stdout, re.MULTILINE) == [
        ("passed" if works else "FAILED", check) for check in ("given_angles", "memory_layouts", "modules")
    ]
    assert (result.returncode == 0) == works
    assert works or result.stderr.count("no CUDA driver: libnot-there.so") == 3


# ---- the emulation finds what is wrong


def mutant(tmp_path, old: str, new: str, file: str) -> Emulation:
    """The emulation of kernels where one thing was changed."""
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "cuda" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    library = tmp_path / "libemulation.so"
    options = [
        "-std=gnu11",
        "-O0",
        "-w",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        f"-I{tmp_path}",
        "-include",
        EMULATION / "emulation.h",
    ]
    files = [EMULATION / "emulation.c", "-o", library, "-lm", "-lpthread"]
    subprocess.run(["gcc", *options, *files], check=True)
    return Emulation(library)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            "rows.inc.h",
            "            __syncthreads();\n            N(finish_freqs)(&work);",
            "            N(finish_freqs)(&work);",
        ),
        ("rows.inc.h", "        __syncthreads(); /* the work before may still be reading */\n", ""),
        ("kernels.cu", "            __syncthreads();\n", ""),
    ],
    ids=["sums of a block", "next work", "final sums"],
)
def test_a_missing_barrier_shows(emulation, tmp_path, file, old, new):
    inputs, settings = operands("many tokens", torch.float32)
    run = rotation_and_gradients(settings)
    wanted = emulation.run(run, *inputs)
    broken = mutant(tmp_path, old, new, file)
    try:
        results = broken.run(run, *inputs, seed=3, max_grid=2)
    finally:
        broken.off()
    assert not all(same_bits(a, b) for a, b in zip(results, wanted, strict=True))


def test_divergent_barriers_and_bad_launches_are_errors(emulation, tmp_path):
    barrier = "        __syncthreads(); /* the work before may still be reading */\n"
    broken = mutant(tmp_path, barrier, "        if (thread < 40) __syncthreads();\n", "rows.inc.h")
    with pytest.raises(RuntimeError, match=r"LAUNCH_FAILED .*divergent threads: thread 0 is at a barrier"):
        broken.run(rotate_something)
    broken.off()


# ---- NVRTC

FAKE_NVRTC = """
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    static char code[4096];
    static int compiled;
    int compilations(void) { return compiled; }
    int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
    int nvrtcCreateProgram(void **program, const char *text, const char *name, int files,
                           const char *const *texts, const char *const *names) {
        *program = code;
        snprintf(code, sizeof code, "%s %d %d %s", name, (int)strlen(text), files, names[files - 1]);
        return 0;
    }
    int nvrtcCompileProgram(void *program, int count, const char *const *options) {
        compiled++;
        for (int i = 0; i < count; i++) strcat(strcat(code, " "), options[i]);
        return strstr(code, "sm_35") ? 5 : 0;
    }
    int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 8; return 0; }
    int nvrtcGetProgramLog(void *program, char *log) { strcpy(log, "too old"); return 0; }
    int nvrtcGetCUBINSize(void *program, size_t *size) { *size = strlen(code) + 1; return 0; }
    int nvrtcGetCUBIN(void *program, char *to) { strcpy(to, code); return 0; }
    int nvrtcDestroyProgram(void **program) { return 0; }
"""

COMPILE_BY_NVRTC = """
    import ctypes, sys
    host, nvrtc, driver, capability = sys.argv[1:]
    host, driver_library, nvrtc_library = ctypes.CDLL(host), ctypes.CDLL(driver), ctypes.CDLL(nvrtc)
    driver_library.emulation_set(b"capability", ctypes.c_long(int(capability)))
    host.rope_cuda_prepare.restype = ctypes.c_char_p
    for _ in range(2):
        host.rope_cuda_use_driver(driver.encode())
        host.rope_cuda_use_nvrtc(nvrtc.encode())
        print(host.rope_cuda_prepare(0))
    print(nvrtc_library.compilations())
"""


@pytest.fixture(scope="session")
def nvrtc_build(tmp_path_factory):
    """The host code as built where no nvcc is, with source, and an NVRTC that echoes what it is asked."""
    folder = tmp_path_factory.mktemp("nvrtc")
    sources = [CSRC / "cuda" / "kernels.cu", *sorted([*CSRC.glob("*.h"), *CSRC.glob("cuda/*.h")])]
    (folder / "sources").write_bytes(
        b"".join(s.name.encode() + b"\0" + s.read_bytes() + b"\0" for s in sources)
    )
    (folder / "fake.c").write_text(textwrap.dedent(FAKE_NVRTC))
    shared = ["gcc", "-std=gnu11", "-shared", "-fPIC", "-w"]
    host = [f"-I{CSRC}", CSRC / "symbols.c", *CSRC.glob("cuda/*.c")]
    embedded = f'-DROPE_CUDA_SOURCE="{folder / "sources"}"'
    subprocess.run([*shared, embedded, *host, "-o", folder / "host.so", "-ldl"], check=True)
    subprocess.run([*shared, folder / "fake.c", "-o", folder / "libnvrtc.so.13"], check=True)
    return folder


@pytest.fixture
def compile_by_nvrtc(emulation, nvrtc_build, tmp_path):
    def run(capability=90, cache=tmp_path / "cache", nvrtc=nvrtc_build / "libnvrtc.so.13"):
        arguments = [nvrtc_build / "host.so", nvrtc, emulation.path, str(capability)]
        command = [sys.executable, "-c", textwrap.dedent(COMPILE_BY_NVRTC), *arguments]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return lambda *arguments, **options: run(*arguments, **options).communicate(timeout=60)[0].splitlines()


def test_nvrtc_compiles_once_and_the_code_is_kept(compile_by_nvrtc, tmp_path):
    assert compile_by_nvrtc() == ["None", "None", "1"]
    (kept,) = (tmp_path / "cache" / "nd_rotary_encodings").iterdir()
    assert re.fullmatch(r"[0-9a-f]{16}-sm_90-nvrtc-13\.0\.cubin", kept.name)
    code = kept.read_bytes()[8:].decode()
    assert code.startswith("kernels.cu ") and "--gpu-architecture=sm_90 --fmad=false" in code
    assert compile_by_nvrtc() == ["None", "None", "0"]
    assert compile_by_nvrtc(capability=86) == ["None", "None", "1"]  # another architecture


@pytest.mark.parametrize(
    "damage", [lambda code: code[:-3], lambda code: code[:9] + b"?" + code[10:], lambda code: b""]
)
def test_damaged_code_is_compiled_again(compile_by_nvrtc, tmp_path, damage):
    compile_by_nvrtc()
    (kept,) = (tmp_path / "cache" / "nd_rotary_encodings").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert compile_by_nvrtc() == ["None", "None", "1"]
    assert kept.read_bytes() == whole


def test_code_is_compiled_in_memory_where_it_cant_be_kept(compile_by_nvrtc, tmp_path):
    (tmp_path / "file").write_text("")
    assert compile_by_nvrtc(cache=tmp_path / "file" / "cache") == ["None", "None", "2"]


def test_processes_at_the_same_time_share_one_file(compile_by_nvrtc, tmp_path, nvrtc_build, emulation):
    arguments = [str(nvrtc_build / "host.so"), str(nvrtc_build / "libnvrtc.so.13"), emulation.path, "90"]
    command = [sys.executable, "-c", textwrap.dedent(COMPILE_BY_NVRTC), *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for process in processes:
        assert process.communicate(timeout=60)[0].splitlines()[:2] == ["None", "None"]
    assert len(list((tmp_path / "cache" / "nd_rotary_encodings").iterdir())) == 1


def test_nvrtc_that_fails_or_is_missing_is_an_error(compile_by_nvrtc, nvrtc_build):
    first = compile_by_nvrtc(capability=35)[0]
    assert "NVRTC can't compile the CUDA kernels for sm_35 (error 5): too old" in first
    host = ctypes.CDLL(str(nvrtc_build / "host.so"))
    host.rope_cuda_prepare.restype = ctypes.c_char_p
    host.rope_cuda_use_nvrtc(None)
    host.rope_cuda_use_driver(None)
    assert b"no CUDA driver" in host.rope_cuda_prepare(0) or b"NVRTC" in host.rope_cuda_prepare(0)
