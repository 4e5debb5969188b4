"""Builds the C extension: one plain `Extension`, no torch, each file with the flags of its instruction
set."""

import os
import platform
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMMON = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-fexceptions", "-ffp-contract=off"]
if os.environ.get("ND_ROTARY_WERROR") == "1":
    COMMON += ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
if os.environ.get("ND_ROTARY_SANITIZE") == "1":
    COMMON += [
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "x86_64": {"baseline": [], "avx2": AVX2, "avx512": AVX512},
    "aarch64": {"neon": []},
}
machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
instruction_sets = INSTRUCTION_SETS.get(machine, {"baseline": []})

FLAGS = {f"csrc/rope_{name}.c": flags for name, flags in instruction_sets.items()}
SOURCES = sorted(
    ["csrc/module.c", "csrc/rope_cpu.c", "csrc/rope_cuda.c", "csrc/rope_driver.c", *glob("csrc/torch_*.c"), *FLAGS]
)


class BuildExtension(build_ext):
    """Compiles the files in parallel, each with its own flags."""

    def build_extension(self, ext):
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
sanitize = ["-fsanitize=address,undefined"] if os.environ.get("ND_ROTARY_SANITIZE") == "1" else []

setup(
    ext_modules=[
        Extension(
            "nd_rotary_encodings._C",
            sources=SOURCES,
            depends=[os.path.join("csrc", name) for name in os.listdir("csrc") if name.endswith(".h")],
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if limited else [],
            extra_compile_args=COMMON,
            extra_link_args=sanitize,
            libraries=["m", "dl"] if os.uname().sysname == "Linux" else [],
            py_limited_api=limited,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {},
)
