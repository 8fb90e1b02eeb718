"""Builds the optional C++ kernels; everything else is in pyproject.toml."""

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CPU = Path("memtrain/kernels/cpu")
STAMPED = CPU / "isa.cpp"  # tells what the library was built of


def included_by(made):
    """The files that an object was made of, as `-MMD` left them beside it."""
    rule = made.with_suffix(".d")
    return rule.read_text().replace("\\\n", " ").split()[1:] if rule.exists() else []


def is_newer(made, sources):
    paths = [Path(name) for name in sources]
    return made.exists() and all(
        path.exists() and path.stat().st_mtime < made.stat().st_mtime for path in paths
    )


class BuildPlainLibrary(build_ext):
    """Libraries without a Python ABI tag: one build serves every Python and torch."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext):
        return ext.export_symbols

    def build_extension(self, ext):
        compile_always = self.compiler.compile

        digest = runpy.run_path(str(CPU / "sources.py"))["digest"]()

        def compile_one(source, **options):
            (made,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            if Path(source) == STAMPED:  # always: a file that is gone changes the digest too
                options["macros"] = [("MT_SOURCES", f'"{digest}"')]
            elif is_newer(Path(made), [*included_by(Path(made)), source]):
                return [made]
            return compile_always([source], **options)

        def compile_side_by_side(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_one(source, **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)


class AnyPythonsWheel(bdist_wheel):
    """One wheel for every Python of a platform; for every platform, where nothing was compiled."""

    def get_tag(self):
        built = list(Path(self.bdist_dir).rglob("*.so"))
        return "py3", "none", super().get_tag()[2] if built else "any"


# No contraction and no reassociation: the results equal the reference bit for bit.
OPTIONS = [
    "-O3",
    "-g0",
    "-MMD",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wno-psabi",  # vectors never cross a library boundary
]

setup(
    ext_modules=[
        Extension(
            "memtrain.kernels.cpu.libmemtrain",
            sources=sorted(map(str, CPU.rglob("*.cpp"))),
            include_dirs=[str(CPU)],
            depends=sorted(map(str, CPU.rglob("*.h"))),
            extra_compile_args=OPTIONS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
    ],
    cmdclass={"build_ext": BuildPlainLibrary, "bdist_wheel": AnyPythonsWheel},
)
