"""Generate mutants: small changes to a Python source, each at a place in its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
OPPOSITES = {"min": "max", "minimum": "maximum", "amin": "amax", "any": "all"}
OPPOSITES |= {other: name for name, other in OPPOSITES.items()}
LIBRARY_DEFAULTS = frozenset({"dtype", "dim", "keepdim", "min", "max", "other", "mask", "default", "key", "strict"})
"""Keywords that have defaults in torch, Triton and Python's own functions."""
UNSEEN = frozenset(
    {"num_warps", "num_stages", "loop_unroll_factor", "eviction_policy", "device", "non_blocking", "pin_memory"}
)
"""Keywords, and keys of a kernel's options, that change nothing a CPU test could observe."""
MESSAGES = frozenset({"require", "expect"})
"""Calls whose arguments after the first are error text."""
UNTOUCHED = frozenset({"__repr__", "__str__"})
Definition = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[int, int, str, str]
"""Begin, end, new text, operator."""


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    before, after: the changed lines, without indentation
    begin, end, text: the bytes of the source to replace, and their replacement
    """

    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    begin: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with the change."""
        encoded = source.encode()
        return (encoded[: self.begin] + self.text.encode() + encoded[self.end :]).decode()


def keywords_with_defaults(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the keywords that have defaults, by the name of the function or class called."""
    found: dict[str, set[str]] = {}
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Definition):
                arguments = node.args
                positional = [*arguments.posonlyargs, *arguments.args]
                with_default = positional[len(positional) - len(arguments.defaults) :]
                given = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                with_default += [argument for argument, default in given if default is not None]
                found.setdefault(node.name, set()).update(argument.arg for argument in with_default)
            elif isinstance(node, ast.ClassDef):
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and field.value]
                names = {field.target.id for field in fields if isinstance(field.target, ast.Name)}
                found.setdefault(node.name, set()).update(names)
    return found


def mutants(file: str, source: str, defaults: Mapping[str, set[str]]) -> list[Mutant]:
    """Return every mutant of the functions' bodies, in text order."""
    return sorted(_Finder(file, source, defaults).found(), key=lambda mutant: (mutant.begin, mutant.end, mutant.text))


class _Finder:
    def __init__(self, file: str, source: str, defaults: Mapping[str, set[str]]) -> None:
        self.file, self.defaults = file, defaults
        self.source = source.encode()
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        yield from self._definitions(self.tree, "")

    def _definitions(self, parent: ast.AST, prefix: str) -> Iterator[Mutant]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition):
                if node.name not in UNTOUCHED:
                    yield from self._body(node, f"{prefix}{node.name}")
            elif isinstance(node, ast.ClassDef):
                yield from self._definitions(node, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from self._definitions(node, prefix)

    def _body(self, function: Definition, name: str) -> Iterator[Mutant]:
        for statement in function.body:
            yield from self._visit(statement, name)

    def _visit(self, node: ast.AST, name: str) -> Iterator[Mutant]:
        if isinstance(node, Definition):
            if node.name not in UNTOUCHED:
                yield from self._body(node, f"{name}.{node.name}")
            return
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        for begin, end, text, operator in self._edits(node):
            yield self._mutant(name, begin, end, text, operator)
        for child in self._children(node):
            yield from self._visit(child, name)

    @staticmethod
    def _children(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.AnnAssign):
            yield from [node.value] if node.value else []
        elif isinstance(node, ast.keyword) and node.arg in UNSEEN:
            return
        elif isinstance(node, ast.Dict):
            yield from (value for key, value in zip(node.keys, node.values, strict=True) if _text_of(key) not in UNSEEN)
        elif isinstance(node, ast.Call) and _called(node) in MESSAGES:
            yield from node.args[:1]
        elif isinstance(node, ast.Call) and _called(node) in ("isinstance", "cast"):
            yield from node.args[:1] if _called(node) == "isinstance" else node.args[1:]
        else:
            yield from ast.iter_child_nodes(node)

    def _edits(self, node: ast.AST) -> Iterator[Edit]:
        """Yield each edit of the node itself, not of its children."""
        if isinstance(node, ast.Compare):
            left: ast.expr = node.left
            for comparison, right in zip(node.ops, node.comparators, strict=True):
                yield from self._between(left, right, *COMPARISONS[type(comparison)], "comparison")
                left = right
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for first, second in zip(node.values, node.values[1:], strict=False):
                yield from self._between(first, second, old, new, "and/or")
        elif isinstance(node, ast.BinOp) and not any(_is_text(side) for side in (node.left, node.right)):
            yield from self._between(node.left, node.right, *ARITHMETIC.get(type(node.op), ("@", "*")), "arithmetic")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            begin = self._begin(node)
            yield begin, begin + len("not " if isinstance(node.op, ast.Not) else "-"), "", "sign or not dropped"
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp | ast.IfExp):
                    yield self._end(bound), self._end(bound), " + 1", "slice bound"
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.stmt):
            yield from self._statement(node)

    def _statement(self, node: ast.stmt) -> Iterator[Edit]:
        if isinstance(node, ast.AugAssign):
            yield self._begin(node), self._end(node), "pass", "statement deleted"
            old, new = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, f"{old}=", f"{new}=", "arithmetic")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self._begin(node), self._end(node), "pass", "statement deleted"
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield self._begin(node.value), self._end(node.value), "None", "return value dropped"

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        begin, end = self._begin(node), self._end(node)
        if isinstance(node.value, bool):
            yield begin, end, str(not node.value), "constant"
        elif isinstance(node.value, int | float):
            # Adding 1 to a large float changes nothing.
            for value in (value for value in (node.value + 1, node.value - 1) if value != node.value):
                yield begin, end, str(value) if value >= 0 else f"({value})", "constant"

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        name = _called(node)
        if name in OPPOSITES:
            end = self._end(node.func)
            yield end - len(name), end, OPPOSITES[name], "min/max, any/all"
        known = self.defaults.get(name, LIBRARY_DEFAULTS)
        arguments: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=self._begin)
        for place, argument in enumerate(arguments):
            if isinstance(argument, ast.keyword) and argument.arg in known - UNSEEN and not _is_default(argument):
                # Include the comma before it; for the first argument, everything up to the next one.
                begin, end = self._begin(argument), self._end(argument)
                if place:
                    begin = self._end(arguments[place - 1])
                else:
                    end = self._begin(arguments[1]) if len(arguments) > 1 else self._end(node) - 1
                yield begin, end, "", "keyword dropped"

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str, operator: str) -> Iterator[Edit]:
        """Change the first occurrence of an operator between two operands."""
        begin, end = self._end(left), self._begin(right)
        place = self.source[begin:end].find(old.encode())
        if place >= 0:
            yield begin + place, begin + place + len(old), new, operator

    def _mutant(self, function: str, begin: int, end: int, text: str, operator: str) -> Mutant:
        first = self.source.rfind(b"\n", 0, begin) + 1
        last = self.source.find(b"\n", end)
        before = self.source[first:last].decode()
        after = (self.source[first:begin] + text.encode() + self.source[end:last]).decode()
        line = self.source.count(b"\n", 0, begin) + 1
        return Mutant(self.file, line, function, operator, _flat(before), _flat(after), begin, end, text)

    def _begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _called(node: ast.Call) -> str:
    """Return the last part of the called name."""
    return ast.unparse(node.func).rpartition(".")[2]


def _is_default(argument: ast.keyword) -> bool:
    return argument.arg == "dtype" and ast.unparse(argument.value) == "torch.float32"


def _text_of(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or bool(_text_of(node))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _flat(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
