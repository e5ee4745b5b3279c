"""The house keeps its rules: imports go down, files stay small, nothing is left without an importer."""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): path
    for src in (ROOT / "packages" / package / "src" for package in ("core", "models", "server"))
    for path in src.rglob("*.py")
}
# Modules that something other than an import statement reaches: entry points and `python -m`.
ENTRY_POINTS = {
    "trueup.core", "trueup.models", "trueup.server", "trueup.core.cli", "trueup.core.doctor", "trueup.core.explain",
    "trueup.models.generate", "trueup.models.demo", "trueup.models.ledger_command", "trueup.server.serve",
    "trueup.models.acceptance.command", "trueup.models.training.__main__",
    "trueup.core.picture",  # chapters draw with it
}
# The parts of core from the ground up (design table): a part imports only from parts above it here.
CORE_ORDER = [
    "hostnpu", "device", "ops", "segment", "invariants", "layout", "planning", "pages", "cache", "key_value",
    "rows", "carry", "view", "layers", "attention", "model", "sampling", "round", "scheduler", "speculation",
    "engine", "scripted", "ledger", "messages", "explain", "doctor", "cli", "picture",
]
# From prompt to logits: what a reader follows.  Apart from it: the reference kernels, which requests run (scheduler,
# pages), what a layout is checked for, and how ids become text again.
READING_PATH = [
    "trueup.models.tokenizer", "trueup.core.engine", "trueup.core.planning", "trueup.core.segment",
    "trueup.core.layout", "trueup.core.cache", "trueup.core.rows", "trueup.core.view",
    "trueup.models.glm4_moe_lite", "trueup.models.decoder",
    "trueup.core.attention.mla", "trueup.core.attention.absorbed", "trueup.core.attention.expanded",
    "trueup.core.layers.norm", "trueup.core.layers.rope", "trueup.core.layers.mlp",
]


def imports_of(module: str) -> set[str]:
    """Every trueup module that ``module`` imports: at its top, inside a function, or by a name in a string."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value, f"trueup.core.ops.{node.value}"}  # lazy exports; operator families
    return found & set(SOURCES)


def test_no_module_is_left_without_an_importer():
    used = set().union(*(imports_of(module) for module in SOURCES))
    packages = {m for m in SOURCES if any(other.startswith(m + ".") for other in SOURCES)}
    assert set(SOURCES) - used - ENTRY_POINTS - packages == set()


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_only_go_down(module):
    package = module.split(".")[1]
    allowed = {"core": {"core"}, "models": {"core", "models"}, "server": {"core", "models", "server"}}[package]
    for target in imports_of(module):
        assert target.split(".")[1] in allowed, f"{module} imports {target}"
        if package == "core" and module.count(".") > 1 and target.count(".") > 1:
            mine, theirs = (CORE_ORDER.index(name.split(".")[2]) for name in (module, target))
            assert theirs <= mine, f"{module} imports {target}, which stands above it"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_files_stay_small(module):
    assert len(SOURCES[module].read_text(encoding="utf-8").splitlines()) <= 400


def test_prompt_to_logits_reads_in_under_1200_lines():
    assert sum(len(SOURCES[m].read_text(encoding="utf-8").splitlines()) for m in READING_PATH) < 1200


def test_only_operators_call_the_dispatcher_by_name():
    """One way to call: torch.ops.npu.X.  Nothing imports torch_npu besides what decides whether it is there."""
    for module, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        if "import torch_npu" in text:
            assert module.startswith(("trueup.core.ops.load", "trueup.core.hostnpu", "trueup.core.doctor")), module
