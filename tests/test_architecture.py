"""The rules of the code base that a reviewer would otherwise have to look for."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aserve"
SOURCES = sorted(PACKAGE.rglob("*.py"))

HOST = ("tokenizer", "structured", "parsing", "cache", "scheduler", "store")
DEVICE = ("distributed", "kernels", "quantization", "attention", "layers", "models", "weights", "sampling")
LAYERS = (HOST, DEVICE, ("runner",), ("engine",), ("server", "bench", "deploy", "commands", "cli", "__main__"))
BANNED_NAMES = ("Manager", "Helper", "Util", "Utils", "Handler", "Impl", "Mixin", "Base", "Abstract", "Info")


def layer_of(module: str) -> int:
    """0 for the base files, then up; ``module`` is a dotted name below aserve."""
    parts = module.split(".")
    head = parts[1] if len(parts) > 1 else ""
    return next((rank for rank, names in enumerate(LAYERS, start=1) if head in names), 0)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_imports_point_one_way(trees: dict[Path, ast.Module]) -> None:
    wrong = [
        f"{module_name(path)} imports {target}"
        for path, tree in trees.items()
        if path != PACKAGE / "__init__.py"  # the lazy public names
        for target in imports(tree)
        if target.startswith("aserve.") and layer_of(target) > layer_of(module_name(path))
    ]
    assert not wrong


def test_packages_of_one_layer_do_not_form_a_cycle(trees: dict[Path, ast.Module]) -> None:
    edges: dict[str, set[str]] = {}
    for path, tree in trees.items():
        source = module_name(path).split(".")
        for target in (name.split(".") for name in imports(tree)):
            if target[0] == "aserve" and len(target) > 2 and len(source) > 2 and target[1] != source[1]:
                edges.setdefault(source[1], set()).add(target[1])

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        return any(
            step == goal or (step not in seen and reaches(step, goal, seen | {step})) for step in edges.get(start, ())
        )

    assert not [package for package in edges if reaches(package, package, set())]


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("torch", (*DEVICE, "runner", "bench", "commands")),
        ("asyncio", ("engine", "server", "bench", "deploy", "commands")),
    ],
)
def test_libraries_stay_where_they_belong(
    library: str, allowed: tuple[str, ...], trees: dict[Path, ast.Module]
) -> None:
    wrong = [
        module_name(path)
        for path, tree in trees.items()
        if any(name.split(".")[0] == library for name in imports(tree))
        and not any(path.is_relative_to(PACKAGE / package) for package in allowed)
    ]
    assert not wrong


def test_importing_the_package_and_its_facade_loads_no_torch() -> None:
    code = (
        "import sys, aserve, aserve.cli, aserve.engine.async_engine, aserve.server.app\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_package_inits_are_empty() -> None:
    filled = [path for path in SOURCES if path.name == "__init__.py" and path.parent != PACKAGE and path.stat().st_size]
    assert not filled


def test_no_global_statements_and_no_vague_names(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{module_name(path)}:{node.lineno} global")
            if isinstance(node, ast.ClassDef) and node.name.endswith(BANNED_NAMES):
                wrong.append(f"{module_name(path)}:{node.lineno} {node.name}")
    assert not wrong


def test_every_task_has_an_owner(trees: dict[Path, ast.Module]) -> None:
    dropped = [
        f"{module_name(path)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in ("create_task", "ensure_future")
        and not (isinstance(node.value.func.value, ast.Name) and node.value.func.value.id in ("group", "tasks"))
    ]
    assert not dropped


def test_nothing_is_unpickled(trees: dict[Path, ast.Module]) -> None:
    unsafe = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert not [
        module_name(path) for path, tree in trees.items() if unsafe & {name.split(".")[0] for name in imports(tree)}
    ]


def test_modules_stay_readable() -> None:
    assert not [str(path) for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > 400]


def test_the_wheel_ships_every_file_of_the_package() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["aserve"]
    shipped = {path for pattern in globs for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others <= shipped
    assert all(any(PACKAGE.glob(pattern)) for pattern in globs), "a pattern that matches nothing"


def test_the_design_document_names_files_that_exist() -> None:
    files = [f"/{path.relative_to(ROOT)}" for folder in ("aserve", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert named
    assert not {name for name in named if not any(file.endswith(f"/{name}") for file in files)}


def test_top_level_is_the_agreed_one() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    allowed = {
        "pyproject.toml", "README.md", "aserve", "tests", "clients", "config", "Dockerfile",
        "LICENSE", "Makefile", "docs", ".ci", ".gitignore", ".dockerignore",
    }  # fmt: skip
    assert {line.split("/")[0] for line in tracked.splitlines()} <= allowed
