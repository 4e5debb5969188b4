"""Builds the C extension: one plain `Extension`, no torch, each file with the flags of its instruction
set."""

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

COMMON = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-fexceptions", "-ffp-contract=off"]
if os.environ.get("ND_ROTARY_WERROR") == "1":
    COMMON += ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined"] if os.environ.get("ND_ROTARY_SANITIZE") == "1" else []
if SANITIZE:
    COMMON += [
        *SANITIZE,
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fno-sanitize-recover=all",
        "-fno-wrapv",  # Python's own flags may have -fwrapv, and then no overflow is found
    ]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "x86_64": {"baseline": [], "avx2": AVX2, "avx512": AVX512},
    "aarch64": {"neon": []},
}
machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
instruction_sets = INSTRUCTION_SETS.get(machine, {"baseline": []})

FLAGS = {f"csrc/cpu/{name}.c": flags for name, flags in instruction_sets.items()}
OTHER_MACHINES = {f"csrc/cpu/{name}.c" for sets in INSTRUCTION_SETS.values() for name in sets} - FLAGS.keys()
SOURCES = sorted({*glob("csrc/*.c"), *glob("csrc/*/*.c")} - OTHER_MACHINES)

CUDA_SOURCES = ["csrc/cuda/kernels.cu", *sorted(glob("csrc/*.h") + glob("csrc/cuda/*.h"))]
CUDA_ARCHITECTURES = "8.0+PTX;8.6;8.9;9.0;10.0;12.0"


def find_nvcc():
    """A toolkit's, or that of the package nvidia-cuda-nvcc."""
    packages = glob(sysconfig.get_path("purelib") + "/nvidia/cu*")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *packages]
    nvcc = [shutil.which("nvcc"), *(shutil.which("nvcc", path=f"{home}/bin") for home in homes if home)]
    return next(filter(None, nvcc), None)


def cuda_targets(nvcc):
    """Flags for TORCH_CUDA_ARCH_LIST, or for all architectures that this nvcc knows, and their names."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True).split()
    flags, names = [], []
    for entry in re.split(r"[;,\s]+", (listed or CUDA_ARCHITECTURES).strip(" ;,")):
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", entry)
        if not match:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected numbers such as 9.0 or 8.0+PTX, got {entry!r}")
        number = match[1] + match[2]
        if f"compute_{number}" not in known:
            if listed:
                raise SystemExit(f"TORCH_CUDA_ARCH_LIST: {nvcc} has no architecture {entry}")
            continue
        for kind in ("sm", "compute") if match[3] else ("sm",):
            flags.append(f"-gencode=arch=compute_{number},code={kind}_{number}")
            names.append(f"{kind}_{number}")
    return flags, sorted(names, key=lambda name: (name.startswith("compute"), int(name.split("_")[1])))


def build_cuda(folder, strict=False):
    """The file with the kernels that the extension embeds, as macros: a fatbin, where there is no nvcc source
    for NVRTC, or nothing. ND_ROTARY_CUDA=0 wants nothing, 1 a fatbin or an error. ``strict``: warnings are
    errors, spilled registers among them, which another version of nvcc may have."""
    wish = os.environ.get("ND_ROTARY_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"ND_ROTARY_CUDA: expected 0 or 1, got {wish!r}")
    if wish == "0" or (not wish and os.uname().sysname != "Linux"):
        return []
    os.makedirs(folder, exist_ok=True)
    nvcc = find_nvcc()
    if nvcc is None and wish == "1":
        raise SystemExit("ND_ROTARY_CUDA=1, but no nvcc was found in PATH, CUDA_HOME or /usr/local/cuda")
    if nvcc is None:
        print("no nvcc: the CUDA kernels are embedded as source, which NVRTC compiles at first use")
        path = os.path.join(folder, "rope_cuda.sources")
        with open(path, "wb") as out:
            for source in CUDA_SOURCES:
                with open(source, "rb") as file:
                    out.write(os.path.basename(source).encode() + b"\0" + file.read() + b"\0")
        return [("ROPE_CUDA_SOURCE", f'"{os.path.abspath(path)}"')]
    flags, names = cuda_targets(nvcc)
    path = os.path.join(folder, "-".join(["rope_cuda", *names]) + ".fatbin")
    newest = max(map(os.path.getmtime, [*CUDA_SOURCES, __file__]))
    if not os.path.exists(path) or os.path.getmtime(path) < newest:
        print(f"{nvcc} compiles the CUDA kernels for {' '.join(names)}")
        options = ["--fatbin", "--fmad=false", "--threads=0"]
        release = re.search(r"release (\d+)", subprocess.check_output([nvcc, "--version"], text=True))
        if release and int(release[1]) >= 13:  # drivers for older ones may not know the compression
            options += ["--compress-mode=size"]
        if strict:
            options += ["-Werror=all-warnings", "-Xptxas=--warn-on-spills,--warning-as-error"]
        subprocess.run([nvcc, *options, *flags, "-o", path + ".new", "-Icsrc", CUDA_SOURCES[0]], check=True)
        os.replace(path + ".new", path)
    return [
        ("ROPE_CUDA_IMAGE", f'"{os.path.abspath(path)}"'),
        ("ROPE_CUDA_ARCHITECTURES", f'"{" ".join(names)}"'),
    ]


class BuildCuda(Command):
    """`setup.py build_cuda`: the CUDA kernels alone, for every architecture, strictly."""

    user_options: ClassVar[list] = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        build_cuda("build/cuda", strict=True)


class BuildExtension(build_ext):
    """Compiles the files in parallel, each with its own flags."""

    def build_extension(self, ext):
        cuda = build_cuda(os.path.join(self.build_temp, "cuda"))
        ext.define_macros += cuda
        ext.depends += [value.strip('"') for name, value in cuda if name != "ROPE_CUDA_ARCHITECTURES"]
        compiler, compile_one, compile_all = self.compiler, self.compiler._compile, self.compiler.compile
        pool, jobs = ThreadPoolExecutor(os.cpu_count()), []

        def submit(obj, src, ext_name, cc_args, extra_postargs, pp_opts):
            flags = [*extra_postargs, *FLAGS.get(src.replace(os.sep, "/"), [])]
            jobs.append(pool.submit(compile_one, obj, src, ext_name, cc_args, flags, pp_opts))

        def compile_and_wait(*args, **kwargs):
            objects = compile_all(*args, **kwargs)
            for job in jobs:
                job.result()
            return objects

        compiler._compile, compiler.compile = submit, compile_and_wait
        super().build_extension(ext)


# The limited API gives one binary for every CPython; free-threaded builds have none.
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "nd_rotary_encodings._C",
            sources=SOURCES,
            include_dirs=["csrc"],
            depends=glob("csrc/*.h") + glob("csrc/*/*.h"),
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if limited else [],
            extra_compile_args=COMMON,
            extra_link_args=SANITIZE,
            libraries=["m", "dl", "pthread"] if os.uname().sysname == "Linux" else [],
            py_limited_api=limited,
        )
    ],
    cmdclass={"build_ext": BuildExtension, "build_cuda": BuildCuda},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {},
)
