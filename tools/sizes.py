"""The largest files and functions beside the project's guides: `python -m tools.sizes [PATH ...]`.

Guides, not limits: nothing fails here. A `!` marks what is over one, as a question: would two rooms read better?
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SHOWN = 8
DEFAULT_PATHS = ("src", "tools", "tests", "benchmarks", "examples")
KERNEL_FOLDERS = ("backends/hopper", "backends/triton")
KERNEL_LANGUAGES = {"cutlass", "triton"}
DEVICE_DECORATORS = {"jit", "kernel"}  # cute.jit, cute.kernel, triton.jit

FILE_LINES = {"kernel": 600, "host": 400}
FUNCTION_LINES = {"device": 60, "host": 80}
PARAMETERS = 7
NESTING = 3

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class File:
    path: str
    kind: str
    lines: int

    @property
    def over(self) -> bool:
        return self.lines > FILE_LINES[self.kind]


@dataclass(frozen=True)
class Function:
    path: str
    line: int
    name: str
    kind: str
    lines: int
    parameters: int
    nesting: int

    @property
    def over(self) -> bool:
        return self.lines > FUNCTION_LINES[self.kind] or self.parameters > PARAMETERS or self.nesting > NESTING


Item = TypeVar("Item", File, Function)


def measure(source: str, path: str) -> tuple[File, list[Function]]:
    """One file's own size and that of every function in it, methods and nested functions included."""
    tree = ast.parse(source, path)
    kind = "kernel" if any(folder in path for folder in KERNEL_FOLDERS) and KERNEL_LANGUAGES & _imported(tree) else "host"
    functions = [
        Function(
            path,
            line=node.lineno,
            name=name,
            kind="device" if DEVICE_DECORATORS & {_last_name(decorator) for decorator in node.decorator_list} else "host",
            lines=(node.end_lineno or node.lineno) - node.lineno + 1,
            parameters=_parameters(node),
            nesting=_nesting(node.body),
        )
        for name, node in _functions(tree)
    ]
    return File(path, kind, len(source.splitlines())), functions


def _imported(tree: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode | ast.ClassDef):
            if isinstance(child, FunctionNode):
                yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _last_name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        return _last_name(decorator.func)
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def _parameters(node: FunctionNode) -> int:
    """What a caller has to know: all but self and cls."""
    arguments = node.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def _nesting(body: list[ast.stmt]) -> int:
    return max((_depth(statement) for statement in body), default=0)


def _depth(node: ast.AST) -> int:
    """Blocks inside blocks; an `elif` is as deep as its `if`, and a nested function starts again."""
    if isinstance(node, FunctionNode | ast.ClassDef | ast.expr):
        return 0
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + _nesting(node.body), _depth(node.orelse[0]))
    return isinstance(node, BLOCKS) + max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)


def python_files(paths: list[str]) -> list[Path]:
    found: set[Path] = set()
    for path in map(Path, paths):
        found.update([path] if path.is_file() else path.rglob("*.py"))
    return sorted(found)


def report(files: list[File], functions: list[Function]) -> str:
    """The largest few, and every other one that is over a guide."""
    lines = [f"files (guide: kernel {FILE_LINES['kernel']}, other {FILE_LINES['host']} lines)"]
    for file in _largest(files):
        lines.append(f"{_mark(file)} {file.lines:5}  {file.path}{'  (kernel)' if file.kind == 'kernel' else ''}")
    lines.append(
        f"functions (guide: device {FUNCTION_LINES['device']}, host {FUNCTION_LINES['host']} lines; "
        f"{PARAMETERS} parameters; nesting {NESTING})"
    )
    for function in _largest(functions):
        numbers = f"{function.lines:5} lines {function.parameters:3} parameters {function.nesting:2} deep"
        where = f"{function.path}:{function.line} {function.name}{'  (device)' if function.kind == 'device' else ''}"
        lines.append(f"{_mark(function)} {numbers}  {where}")
    over = sum(file.over for file in files) + sum(function.over for function in functions)
    lines.append(f"{len(files)} files, {sum(file.lines for file in files)} lines, {len(functions)} functions; {over} over a guide")
    return "\n".join(lines)


def _largest(items: list[Item]) -> list[Item]:
    ranked = sorted(items, key=lambda item: -item.lines)
    return ranked[:SHOWN] + [item for item in ranked[SHOWN:] if item.over]


def _mark(item: File | Function) -> str:
    return "!" if item.over else " "


def main(arguments: list[str]) -> None:
    files: list[File] = []
    functions: list[Function] = []
    for path in python_files(arguments or [path for path in DEFAULT_PATHS if Path(path).is_dir()]):
        file, inside = measure(path.read_text(encoding="utf-8"), path.as_posix())
        files.append(file)
        functions += inside
    print(report(files, functions))


if __name__ == "__main__":
    main(sys.argv[1:])
