"""Which names exist in the package, found by reading its source: kernels need no GPU library to be looked up."""

from __future__ import annotations

import ast
import functools
import re

from tests.docs.documents import ROOT

SOURCE = ROOT / "src" / "flash3"
DOTTED = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(\(\))?$")
PATH = re.compile(r"^[\w./-]+\.(py|md|json|toml)$")
OTHERS = {
    "F", "cuda", "cuobjdump", "cute", "cutlass", "dist", "functools", "jax", "jnp", "math", "mbarrier", "np", "numpy", "nn", "os",
    "pytest", "setmaxnreg", "tf", "tensorflow", "tl", "torch", "transformers", "triton", "tvm_ffi", "warpgroup", "wgmma",
}  # fmt: skip
"""First words of dotted names that are not ours."""


@functools.cache
def modules() -> dict[str, frozenset[str]]:
    """Module -> its names: "Thing", and "Thing.member" as well as "member" for what stands in a class."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ["flash3", *path.relative_to(SOURCE).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = frozenset(_names(ast.parse(path.read_text(encoding="utf-8")).body))
    return found


def _names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                members = _names(statement.body)
                names |= {name, *members, *(f"{name}.{member}" for member in members)}
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in statement.names}
            case ast.Assign(targets=targets):
                names |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.If() | ast.Try():
                names |= _names([child for child in ast.walk(statement) if isinstance(child, ast.stmt) and child is not statement])
    return names


def exists(word: str) -> bool:
    """Whether `word`, a dotted name or a file, is there. A module may be named by its last parts: `softmax.OnlineSoftmax`."""
    if PATH.match(word):
        return any((base / word).exists() for base in (ROOT, SOURCE)) or bool(list(SOURCE.rglob(word)))
    parts = word.removesuffix("()").split(".")
    return any(
        _is_tail(".".join(parts[:cut]), module) and (cut == len(parts) or ".".join(parts[cut:]) in names)
        for module, names in modules().items()
        for cut in range(1, len(parts) + 1)
    ) or _exported(parts)


def _is_tail(name: str, module: str) -> bool:
    return f".{module}".endswith(f".{name}")


def _exported(parts: list[str]) -> bool:
    """`flash3.attention`: what the package itself offers, however lazily."""
    import flash3

    return len(parts) == 2 and parts[0] == "flash3" and hasattr(flash3, parts[1])


def missing(words: list[str]) -> list[str]:
    """The dotted names and files among `words` that are ours and do not exist."""
    ours = [word for word in words if PATH.match(word) or (DOTTED.match(word) and word.partition(".")[0] not in OTHERS)]
    return sorted({word for word in ours if not exists(word)})
