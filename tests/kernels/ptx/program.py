"""Reads the PTX of one kernel into a list of instructions.

Reference: NVIDIA, Parallel Thread Execution ISA, version 8.7, chapters 4 to 9.
"""

import re
from typing import NamedTuple

from tests.kernels.ptx.arithmetic import BITS

_COMMENT = re.compile(r"//[^\n]*|^\s*\.(?:loc|file|pragma)\b.*$", re.MULTILINE)
_STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"%[\w.]+")
_LABEL = re.compile(r"(\$?[A-Za-z_]\w*):(?!:)")
_PARAMETER = re.compile(r"\.param \.(\w+)[^,]*?(\w+)\s*(?:,|$)")


class Instruction(NamedTuple):
    """One instruction."""

    text: str
    guard: tuple[str, bool] | None
    """A predicate, and the value of it at which the instruction runs."""
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        """Read one, without its semicolon."""
        found = _STATEMENT.fullmatch(text)
        if found is None:
            raise NotImplementedError(text)
        negated, guard, name, rest = found.groups()
        operands = re.split(r",\s*(?![^{]*\})", rest.strip()) if rest.strip() else []
        first, *modifiers = name.replace("::", ":").split(".")
        condition = (guard, not negated) if guard else None
        return cls(text, condition, first, tuple(modifiers), tuple(x.strip() for x in operands))


class Program(NamedTuple):
    """A kernel."""

    parameters: dict[str, str]
    """Types by name, in order."""
    code: list[Instruction]
    labels: dict[str, int]
    widths: dict[str, int]
    """Bits of registers, by their name or by the letters that it begins with."""
    threads: int
    """Of one program of a grid."""


class _Reader:
    """Reads a kernel's body, in which inline assembly opens scopes with names of their own."""

    def __init__(self, body: str) -> None:
        self._body, self._at = body, body.index("{") + 1
        self._scopes: list[dict[str, str]] = []
        self._opened = 0
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}

    def read(self) -> None:
        """Read all of it."""
        body = self._body
        while True:
            self._at = re.compile(r"\s*").match(body, self._at).end()
            if body[self._at] == "{":
                self._opened += 1
                self._scopes.append({})
                self._at += 1
            elif body[self._at] == "}":
                if not self._scopes:
                    return
                self._scopes.pop()
                self._at += 1
            elif label := _LABEL.match(body, self._at):
                self.labels[label[1]] = len(self.code)
                self._at = label.end()
            else:
                end = body.index(";", self._at)
                if statement := body[self._at : end].strip():
                    self._statement(statement)
                self._at = end + 1

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.split(","):
                self._declare(name.strip().partition("<")[0], BITS[kind.removeprefix(".")])
            return
        for names in self._scopes:
            for name, whole in names.items():
                text = re.sub(rf"(?<![\w.%]){name}\b", whole, text)
        self.code.append(Instruction.parse(text))

    def _declare(self, name: str, bits: int) -> None:
        if self._scopes:
            self._scopes[-1][name] = name = f"%{name}.{self._opened}"
        self.widths[name] = bits


def parse(text: str, *, fuse: bool = False) -> Program:
    """Read the one kernel of a PTX module.

    Args:
        text: As Triton's compiler gives it.
        fuse: Whether products whose rounding is not asked for go into the sums that take them, as
            ptxas may do.
    """
    _, entry, rest = _COMMENT.sub("", text).partition(".entry")
    given, _, body = rest.partition(")")
    threads = re.search(r"\.reqntid\s+(\d+)", body)
    if not entry or threads is None:
        raise NotImplementedError("no entry of a fixed number of threads")
    reader = _Reader(body)
    reader.read()
    parameters = {name: kind for kind, name in _PARAMETER.findall(given.strip())}
    code = _fused(reader.code, {*reader.labels.values()}) if fuse else reader.code
    return Program(parameters, code, reader.labels, reader.widths, int(threads[1]))


def _fused(code: list[Instruction], starts: set[int]) -> list[Instruction]:
    """Sums of a product that nothing else takes, made of both in one instruction.

    Args:
        code: All instructions.
        starts: Numbers of those that others jump to.
    """
    uses: dict[str, int] = {}
    for one in code:
        for name in _REGISTER.findall(" ".join(one.operands[1:])):
            uses[name] = uses.get(name, 0) + 1
    products: dict[str, Instruction] = {}
    fused = []
    for number, one in enumerate(code):
        if number in starts:
            products.clear()
        free = one.guard is None and one.modifiers in (("f32",), ("ftz", "f32"))
        fused.append(_fused_sum(one, products) if free and one.name == "add" else one)
        written = {*_REGISTER.findall(" ".join(one.operands[:1]))}
        products = {to: made for to, made in products.items() if not written & {*made.operands}}
        if free and one.name == "mul" and uses.get(one.operands[0]) == 1:
            products[one.operands[0]] = one
    return fused


def _fused_sum(one: Instruction, products: dict[str, Instruction]) -> Instruction:
    to, *terms = one.operands
    for term, other in (terms, terms[::-1]):
        product = products.get(term)
        if product is not None and product.modifiers == one.modifiers:
            given = (to, *product.operands[1:], other)
            return Instruction(one.text, None, "fma", ("rn", *one.modifiers), given)
    return one
