"""The rules of the house that hold everywhere: acyclic layers, small folders, described packages, the field's words."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.long import mostly_long

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "engine", "prm", "reasoner", "workers", "api")

MAX_MODULES = 16
MAX_FUNCTION_LINES = 60

DIALECT = re.compile(
    r"guess|dealt|doorbell|outbox|(?<![a-z])laws?(?![a-z])|(?<![a-z])story|(?<![a-z])tally|(?<![a-z])grower"
    r"|(?<![a-z])janitor|(?<![a-z])foreign(?!_)|overtaken"
)
"""Words that this code base once used where the field has another one: draft, resampled, wake-up, event queue,
distribution, narration, stats, branch runner, cleanup, OpenAI-compatible, bypassed."""

NO_VERB = re.compile(
    r"_(a_secret|above|absmax|absolute|affordable|ancestors|answer|answers|as_compared|at|backward|bare|"
    r"batch|best|bin|bins|both_ways|bounds|broker|bundled|cache|calculated|candidates|cannot|case|"
    r"cases|ceiling|centred|chain|chat|children|choice|chunk|closes|code|codes|command|comparison|"
    r"conclusion|conclusions|consistent|content|contents|core|cost|count|counts|curve|dearest|decoded|"
    r"default|delivery|digest|digits|divisors|document|dotted|each_once|elementwise|ending|engine|"
    r"entry|envelope|error|errors|event|events|exact|expanded|exponents|failure|families|field|files|"
    r"filled|fits|fitting|flat|folders|follows|formulas|fraction|frequencies|governor|half|has|"
    r"histogram|holds|incomplete|increment|indices|info|integers|item|items|job|kind|letters|line|"
    r"lines|literal|live|locked|logits|logprobs|long_keys|loop|loss|markdown|matches|mathematical|"
    r"mathematics|members|merges|message|moment|named|needed|newton|notes|now|number|numbers|"
    r"objective|operations|operator|option|order|ordered|origins|outcome|output|over_http|packer|page|"
    r"paired|pairs|parent|perplexity|piece|pinned|places|plain|pointer|precision|problem|program|"
    r"proportional|quotas|ratio|reader|registry|remaining|representative|resolved|response|results|"
    r"rollout|room|rounded|row|rows|said|salted|scaling|scores|seconds|secrets|sentencepiece|servers|"
    r"settings|shape|shaped|share|short|sides|signed|silent|similar|single|slot|some|span|spec|"
    r"stage|state|stated|status|strings|sub_path|subpatterns|successors|sum|table|tail|tensor|terms|"
    r"tested|text|texts|threshold|tile|tiles|title|tree|unauthorized|unavailable|unified|unordered|"
    r"usage|value|variation|verdict|verified|version|visible|voters|waiting|weight|weights|where|wide|"
    r"widened|width|with_built_in|within|word|words|yarn|zeros)"
)
"""Names of private functions that say what is returned but not what is done: a verb and an
object replaced each of them. A property may have such a name."""

NOT_A_SENTENCE = re.compile(r"(What|Whether|Who|Whose|How|Of|Where|Those|That|See) ")
"""Beginnings that make a docstring a riddle instead of a sentence."""


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def describe(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


def test_no_folder_has_more_modules_than_a_reader_can_survey() -> None:
    folders = {path.parent for path in python_files(*PACKAGES)}
    counts = {str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) - 1 for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_a_long_function_says_why_it_is_one_piece() -> None:
    unexplained = []
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.body[0].lineno + 1
                if length > MAX_FUNCTION_LINES and "One piece" not in (ast.get_docstring(node) or ""):
                    unexplained.append(describe(path, node.lineno, f"{node.name} has {length} lines"))
    assert unexplained == []


def test_five_arguments_or_more_are_named_where_they_are_passed() -> None:
    """Kernels are compiled and take arguments by position; these classes list the columns or cells of a table."""
    own, exempt = set(), {"Table", "Template"}
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_kernel, has_any_number = path.is_relative_to(ROOT / "kernels"), node.args.vararg is not None
                (exempt if is_kernel or has_any_number else own).add(node.name)
    unnamed = [
        describe(path, node.lineno, ast.unparse(node.func))
        for path in python_files(*PACKAGES[1:])
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and sum(not isinstance(arg, ast.Starred) for arg in node.args) >= 5
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in own - exempt
    ]
    assert unnamed == []


def test_docstrings_begin_with_a_plain_sentence() -> None:
    riddles = []
    for path in python_files(*PACKAGES, "tests"):
        for node in ast.walk(parse(path)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if NOT_A_SENTENCE.match(text):
                    riddles.append(describe(path, node.lineno, text.splitlines()[0]))
    assert riddles == []


def test_every_package_says_what_it_is_for() -> None:
    silent = []
    for path in python_files(*PACKAGES):
        if path.name == "__init__.py" and len(ast.get_docstring(parse(path)) or "") < 60:
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_no_identifier_uses_the_old_dialect() -> None:
    strange = set()
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            for name in names_of(node):
                if DIALECT.search(name.lower()):
                    strange.add(describe(path, getattr(node, "lineno", 0), name))
    assert sorted(strange) == []


def test_no_private_function_is_named_by_a_noun_or_an_adjective() -> None:
    nouns = set()
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if NO_VERB.fullmatch(node.name):
                    if "property" not in map(ast.unparse, node.decorator_list):
                        nouns.add(describe(path, node.lineno, node.name))
    assert sorted(nouns) == []


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a node defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


PLANTED = {
    "inside a function": ("engine/cache/pages.py", "\n\ndef plant():\n    import engine.cache.radix_tree\n"),
    "for the type checker": (
        "reasoner/budget/ledger.py",
        "\n\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import reasoner.search.search\n",
    ),
    "between packages": ("kernels/common/noise.py", "\n\nimport engine.device\n"),
    "of an evaluation by what serves": ("workers/app.py", "\n\nimport reasoner.evaluation.report\n"),
    "of benchmarks by a command": ("api/studies/eval.py", "\n\nimport benchmarks.commands\n"),
}


@pytest.mark.parametrize("where", mostly_long(PLANTED, every=3))
def test_a_planted_import_against_the_layers_breaks_the_contracts(where: str, tmp_path: Path) -> None:
    for package in (*PACKAGES, "benchmarks", "recipes"):
        for path in python_files(package):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    name, lines = PLANTED[where]
    with (tmp_path / name).open("a") as file:
        file.write(lines)
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "BROKEN" in run.stdout


_SEEDING = {"manual_seed", "default_rng", "Random", "RandomState", "seed"}
"""Functions and classes of random, numpy and torch that take a seed."""


def test_every_seed_of_the_tests_is_shifted_by_the_run_or_says_why_not() -> None:
    """``pytest --seed`` would leave out weights or inputs with a bare seed; those with none differ at every run."""
    bare = []
    for path in python_files("tests"):
        if path.name != "seeds.py":
            nodes = list(ast.walk(parse(path)))
            seeded = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
            calls = [node for node in nodes if isinstance(node, ast.Call) and _has_bare_seed(node, seeded)]
            bare += [describe(path, node.lineno, ast.unparse(node)) for node in calls]
    assert bare == []


def _has_bare_seed(node: ast.AST, seeded: set[int]) -> bool:
    """``seeded``: ids of the nodes whose attributes are read, such as a generator's ``manual_seed``."""
    match node:
        case ast.Call(func=ast.Attribute(attr="Generator", value=ast.Name("torch"))):
            return id(node) not in seeded
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(name), args=arguments) if name in _SEEDING:
            return not (arguments and ast.unparse(arguments[0]).startswith(("shift(", "keep(")))
    return False


@pytest.mark.parametrize(
    ("line", "is_bare"),
    [
        ("torch.manual_seed(7)", True),
        ("torch.Generator().manual_seed(size)", True),
        ("torch.Generator()", True),
        ("np.random.default_rng()", True),
        ("Random(3)", True),
        ("random.seed(seed)", True),
        ("random.Random(shift(3))", False),
        ("torch.Generator().manual_seed(shift(size))", False),
        ('np.random.default_rng(keep(3, "a p-value"))', False),
    ],
)
def test_a_bare_seed_is_found(line: str, is_bare: bool) -> None:
    nodes = list(ast.walk(ast.parse(line)))
    seeded = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    assert any(_has_bare_seed(node, seeded) for node in nodes) == is_bare
