"""Builds the optional C++ kernels; everything else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU = Path("memtrain/kernels/cpu")


class BuildPlainLibrary(build_ext):
    """A C library without a Python ABI tag: one build serves every Python and torch."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext):
        return ext.export_symbols

    def build_extension(self, ext):
        compile_always = self.compiler.compile
        headers = max((Path(name).stat().st_mtime for name in ext.depends), default=0.0)

        def compile_one(source, **options):
            (made,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            newest = max(headers, Path(source).stat().st_mtime, Path(__file__).stat().st_mtime)
            if Path(made).exists() and Path(made).stat().st_mtime > newest:
                return [made]
            return compile_always([source], **options)

        def compile_side_by_side(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_one(source, **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "memtrain.kernels.cpu.libmemtrain",
            sources=sorted(str(path) for path in CPU.glob("*.cpp")),
            depends=sorted(str(path) for path in CPU.glob("*.h")),
            # No contraction and no reassociation: the results equal the reference bit for bit.
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                "-pthread",
                "-Wall",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildPlainLibrary},
)
