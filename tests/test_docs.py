"""What the documentation says is so: names, defaults, commands, links, and the tutorial's plugin runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import OmegaConf
from recpipe_answer_cache.command import ReplayOptions
from recpipe_deeprecsys.config import BenchOptions
from recpipe_low_precision.command import QuantizeOptions
from recpipe_retrieval.command import IndexOptions, RetrieveOptions
from recpipe_scale_out.config import CutConfig, of_words

import recpipe
import recpipe.kit
import recpipe.plugin
import recpipe.testing
from recpipe.answers.apply import WORDS as APPLY_WORDS
from recpipe.answers.evaluate import EvaluateOptions
from recpipe.answers.package import WORDS as PACKAGE_WORDS
from recpipe.answers.predict import PredictOptions
from recpipe.answers.words import of_plugins, parted
from recpipe.config.compose import compose, conf_dir
from recpipe.data.config import CONFIGS
from recpipe.plugin.api import Contribution, Invariant
from recpipe.plugin.context import Io
from recpipe.plugin.load import installed
from recpipe.report.record import DataFigures, Memory, Point, RankFigures, Resumed, RunReport, Throughput
from recpipe.tables.tiers.policies import POLICIES
from recpipe.tasks import sweep_launcher
from recpipe.tasks.plugins import starter
from recpipe.tasks.schema import of_command
from tests.pages import write_site
from tests.processes import Child

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PLUGINS = DOCS / "plugins.md"
SITE = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
RESULTS = ROOT / "benchmarks" / "results"
IN_TREE = sorted(path.parent for path in ROOT.glob("plugins/recpipe_*/README.md"))
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *SITE,
        *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
)
PROGRAM = r"python3? -m recpipe|torchrun .*?-m recpipe|recpipe"
COMMAND = rf"(?:^\s*(?:\$ )?|&& *)(?:[\w./-]*/)?(?:{PROGRAM})(?= |$)(.*)"
EXAMPLES = {"tinylfu", "spread", "warm", "skipsmall", "halfcold", "fm", "sqlite", "skew", "skip_small"}
WORDS = ("plugin", "model", "data", "task", "config-dir", "compare.plugins")
TUTORIAL = {"first", "hello", "skip_small", "click_tower", "my_tower", *EXAMPLES}
"""Plugins and models that the pages teach to write; they are not installed here."""


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def guide() -> str:
    """All pages of the guide."""
    return "\n".join(text(page) for page in [DOCS / "guide.md", *sorted(DOCS.glob("guide/*.md"))])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path, *languages: str) -> Iterator[str]:
    """Code blocks in one of ``languages``."""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield code


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every ``recpipe`` command in a page, placeholders (``...``, upper case words) left out."""
    for code in fences(page, "sh", "bash", "console", ""):
        joined = code.replace("\\\n", " ")
        for line in joined.splitlines():
            found = re.search(COMMAND, line)
            if found and "pip install" not in line:
                words = shlex.split(found.group(1).partition("&&")[0].partition(" | ")[0], comments=True)
                yield [word for word in words if "..." not in word]


@pytest.fixture(autouse=True, scope="module")
def _launcher() -> None:
    """What the command line makes known to Hydra before it composes."""
    sweep_launcher.register()


ANSWERS = {
    "evaluate": EvaluateOptions,
    "predict": PredictOptions,
    "quantize": QuantizeOptions,
    "index": IndexOptions,
    "retrieve": RetrieveOptions,
}
RCP = [("make", {"output"}), ("make", {"output", "row"}), ("check", set()), ("check", {"rcps"})]
"""What pages say of recpipe rcp."""
COMMANDS = [pytest.param(c, id=f"{name_of(p)}: {' '.join(c)}") for p in PAGES for c in commands(p)]


# -- names -----------------------------------------------------------------------------------


def test_every_extension_point_has_a_section_in_data_flow_order() -> None:
    sections = re.findall(r"^### `(\w+)`", text(PLUGINS), re.MULTILINE)
    assert sections == [field.name for field in dataclasses.fields(Contribution)]


def test_the_law_of_every_extension_point_is_right() -> None:
    """The word in a section's title is the one that the field's own description starts with."""
    source = text(ROOT / "recpipe" / "plugin" / "api.py").partition("class Contribution")[2]
    for name, law in re.findall(r"^### `(\w+)` \(([\w-]+)\)", text(PLUGINS), re.MULTILINE):
        described = re.search(rf'^    {name}: .*?"""(\w[\w-]*):', source, re.MULTILINE | re.DOTALL)
        assert described is not None, name
        assert described.group(1).lower() == law, name


@pytest.mark.parametrize("module", [recpipe.plugin, recpipe.kit, recpipe.testing], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    page = text(DOCS / "api" / f"{module.__name__.rpartition('.')[2]}.md")
    documented = set(re.findall(rf"^\.\. auto\w+:: {module.__name__}\.(\w+)$", page, re.MULTILINE))
    documented |= set(re.findall(r"^\.\. py:data:: (\w+)$", page, re.MULTILINE))
    assert documented == set(module.__all__)


@pytest.mark.parametrize("invariant", list(Invariant), ids=lambda i: i.name)
def test_every_invariant_is_described(invariant: Invariant) -> None:
    row = next((line for line in text(PLUGINS).splitlines() if line.startswith(f"| `{invariant.name}`")), "")
    assert invariant.value in row.replace("`", "")


def test_every_choice_of_every_group_is_named() -> None:
    said = "\n".join(map(text, PAGES))
    for file in conf_dir().glob("*/*.yaml"):
        group, option = file.parent.name, file.stem
        assert f"{group}={option}" in said or (f"`{group}=`" in said and f"`{option}`" in said), file
    for plugin in IN_TREE:
        for file in (plugin / "conf" / "plugin").glob("*.yaml"):
            assert f"+plugin={file.stem}" in said


def test_every_policy_is_named() -> None:
    for policy in ("resident", *POLICIES):
        assert f"`{policy}`" in guide() or f"={policy}`" in guide(), policy


def test_every_data_source_is_named() -> None:
    for name in CONFIGS:
        assert f"`{name}`" in guide(), name


@pytest.mark.parametrize("plugin", IN_TREE, ids=lambda p: p.name)
def test_every_knob_is_in_the_plugins_readme_with_its_default(plugin: Path) -> None:
    for file in (plugin / "conf" / "plugin").glob("*.yaml"):
        knobs = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(knobs, dict)
        for knob, value in knobs.items():
            shown = json.dumps(value).strip('"')
            assert f"| `plugins.{file.stem}.{knob}` | {shown} |" in text(plugin / "README.md"), knob


def script(name: str) -> ModuleType:
    """One of the scripts in ``docs/`` that write pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_of_the_interfaces_have_every_name_without_being_built() -> None:
    """``python docs/names.py`` writes them."""
    names = script("names")
    for page in names.PAGES:
        assert names.page(page) == (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8"), page


def test_tables_of_results_are_those_of_their_data() -> None:
    """``python docs/tables.py`` writes them."""
    for page, written in script("tables").pages().items():
        assert written == text(page), page


@pytest.mark.parametrize(
    "file",
    sorted([*conf_dir().glob("model/*.yaml"), *ROOT.glob("plugins/*/conf/model/*.yaml")]),
    ids=lambda file: file.stem,
)
def test_every_model_has_a_page(file: Path) -> None:
    """With the same sections on each, its own keys, and a row in the list of all."""
    page = DOCS / "models" / f"{file.stem}.md"
    sections = re.findall(r"^## (.+)$", text(page), re.MULTILINE)
    always = ["Formula", "When to take it", "Features", "Keys", "Elsewhere", "Limits"]
    assert [section for section in sections if section in always] == always
    assert f"{{literalinclude}} ../../{file.relative_to(ROOT)}\n" in text(page)
    assert any(True for _ in commands(page))
    assert f"](../models/{file.stem}.md) | `{file.stem}` |" in text(DOCS / "guide" / "published.md")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_result_says_how_where_and_when_it_was_measured(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert set(result) == {"title", "command", "machine", "commit", "date", "kept", "columns", "rows"}
    assert all(result[key] for key in ("title", "command", "machine", "date", "kept", "rows"))
    published_alone = result["date"].startswith("published: ")  # which have a year
    assert re.search(r"20\d\d" if published_alone else r"20\d\d-\d\d-\d\d", result["date"])
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    for program in re.findall(r"benchmarks/\w+(?:\.py)?(?= |$|;)", result["command"]):
        assert (ROOT / program).exists(), program


@pytest.mark.parametrize("words", ["early stopping", "Adam", "learning rate schedule"])
def test_what_users_search_for_stands_on_a_page(words: str) -> None:
    """A site's search finds words, not parts of names such as EarlyStopping."""
    assert re.search(rf"\b{words}\b", " ".join(guide().split()), re.IGNORECASE)


@pytest.mark.parametrize(
    "kind",
    [RunReport, DataFigures, Io, Memory, RankFigures, Resumed, Throughput, Point],
    ids=lambda k: k.__name__,
)
def test_every_key_of_the_report_is_described(kind: type) -> None:
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in guide(), field.name


# -- commands, links, code -------------------------------------------------------------------


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_compose(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("plugins", "doctor", "--help"):
        new = arguments[:2] == ["plugins", "new"]
        assert len(arguments) <= 1 or (new and starter(*arguments[2:]))
        return
    if arguments[0] == "perf":
        assert arguments[1:] in (["calibrate"], ["calibrate", "--quick"], ["show"])
        return
    if arguments[0] == "rcp":
        options = {word.partition("=")[0] for word in arguments[2:] if "=" in word}
        assert (arguments[1], options) in RCP
        return
    if arguments[0] == "answer-cache":
        mine, others = of_plugins(arguments[2:])
        _, overrides, _ = parted(others, ReplayOptions, "answer-cache")
        compose(["data=parquet", "+plugin=answer_cache", *mine, *overrides])
        return
    if arguments[0] in ANSWERS:
        _, overrides, _ = parted(arguments[2:], ANSWERS[arguments[0]], arguments[0])
        compose(["data=parquet", *overrides])
        return
    if arguments[0] == "bench-serve":
        _, overrides, _ = parted(arguments[2:], BenchOptions, "bench-serve")
        compose([f"experiment={arguments[1]}"] * (not arguments[1].endswith(".recpipe")) + overrides)
        return
    if arguments[0] == "shard":
        of_words(CutConfig, arguments[3:], "shard")
        return
    if arguments[0] == "serve":
        mine, _ = of_plugins(arguments[2:])
        compose(mine)
        return
    if arguments[0] == "apply":
        options = {word.partition("=")[0] for word in arguments[1:] if "=" in word}
        assert options <= {*APPLY_WORDS}
        assert len(arguments) - 1 - len(options) >= 2
        return
    if arguments[0] == "log":
        assert len(arguments) in (2, 3)
        return
    if arguments[0] == "package":
        assert {word.partition("=")[0] for word in arguments[3:]} <= {*PACKAGE_WORDS}
        return
    if arguments[0] == "schema":
        of_command(arguments[1:])
        return
    words = {"sweep-report": 2, "unshard": 3, "deploy": 4}
    if arguments[0] in words:
        assert len(arguments) == words[arguments[0]]
        return
    overrides = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    if any(re.search(rf"\b{name}\b", override) for name in TUTORIAL for override in overrides):
        overrides = [o for o in overrides if not o.lstrip("+-").startswith(WORDS)]
    if len(overrides) < len(arguments) and "-m" in arguments:
        overrides = [re.sub(r"^([^=\[{]+=[^,\[{]+),.*", r"\1", override) for override in overrides]
    overrides = [override for override in overrides if override not in ("--cfg", "job")]
    if "task=compare" in overrides:  # the command line hands knobs on to the rows that have the plugin
        overrides = [f"+{word}" if word.startswith("plugins.") else word for word in overrides]
    compose(overrides)


def test_there_are_commands_to_check() -> None:
    """The patterns above find what they should."""
    assert len(COMMANDS) >= 12
    assert any("task=compare" in c.values[0] for c in COMMANDS)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_in_the_index_once() -> None:
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", text(DOCS / "index.md"), re.MULTILINE | re.DOTALL)
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(entries) == sorted(
        str(page.relative_to(DOCS).with_suffix("")) for page in SITE if page != DOCS / "index.md"
    )


@pytest.mark.parametrize("page", SITE, ids=name_of)
def test_what_a_page_includes_is_there(page: Path) -> None:
    for target in re.findall(r"^```\{(?:literal)?include\} (\S+)", text(page), re.MULTILINE):
        assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_are_python(page: Path) -> None:
    for code in fences(page, "python"):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_about_the_project_alone(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(work|tmp|opt|root|home)/", text(page))


# -- the tutorial ----------------------------------------------------------------------------


def test_hello_world_runs(tmp_path: Path) -> None:
    """The four files as the page has them, found through an entry point as pip would write it."""
    files = write_site(PLUGINS, tmp_path / "site")
    assert set(files) == {
        "pyproject.toml",
        "recpipe_first/__init__.py",
        "recpipe_first/plugin.py",
        "recpipe_first/conf/plugin/first.yaml",
    }
    done = Child(
        tmp_path / "cli",
        *("+plugin=[hotline,first]", "plugins.first.digits=2", "data.samples=2000", "data.table_scale=0.01"),
        *("hydra.run.dir=out", "trainer.progress=false"),
        script=f"import sys, recpipe.cli; sys.path[:0] = [{str(tmp_path / 'site')!r}]; recpipe.cli.program()",
    ).ended()
    assert done.returncode == 0, done.stderr
    shown = json.loads((tmp_path / "cli" / "out" / "report.json").read_text())["plugins"]["first"][
        "click_share"
    ]
    assert 0 < shown < 1
    assert shown == round(shown, 2)
    assert "first" not in installed()
