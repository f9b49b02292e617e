"""How the modules of the package depend on each other."""

import ast
import graphlib
from pathlib import Path

import pytest

import lora_backends

ROOT = Path(lora_backends.__file__).parent
MODULES = {
    ".".join(("lora_backends", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def _imports(module):
    """Return the modules of the package that a module imports anywhere, for types too."""
    found, pending = set(), list(ast.parse(MODULES[module].read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = names & MODULES.keys()
            found |= inner | ({node.module} if inner != names else set())
        pending += ast.iter_child_nodes(node)
    # a package makes the names of its modules importable, and is not used by them
    return {name for name in found & MODULES.keys() if name != "lora_backends"}


def test_no_module_imports_itself_through_others():
    graph = {module: _imports(module) for module in MODULES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("engine", ["gpu", "triton", "csgmv", "numba_cpu", "torch_ref"])
@pytest.mark.parametrize(
    "module", ["common.names", "errors", "selection.registry", "selection.config", "selection"]
)
def test_choosing_an_engine_imports_none(module, engine):
    imported = _imports(f"lora_backends.{module}")
    assert not [name for name in imported if name.startswith(f"lora_backends.{engine}")]
