"""What a user installs: the wheel with its conf and plugins, and a third-party plugin beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from contextlib import chdir
from importlib import import_module
from pathlib import Path

import pytest

from recpipe.config.compose import compose
from recpipe.plugin.offers import GROUPS, PLUGIN, imported, offered, origin_of
from recpipe.tasks.plugins import MADE, describe_part, listed, write_starter
from tests.pages import importable

ROOT = Path(__file__).resolve().parent.parent
HELLO = ROOT / "examples" / "recpipe-hello"
TOWER = ROOT / "examples" / "recpipe-tower"
SKIP_SMALL = ROOT / "examples" / "recpipe-skip-small"
EXAMPLES = (HELLO, TOWER, SKIP_SMALL)


def build(project: Path, folder: Path) -> Path:
    """The project's wheel, made by the build backend that it names, as pip would without network."""
    backend = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["build-system"]["build-backend"]
    pytest.importorskip(backend, reason="building wheels needs the test extra: pip install -e '.[test]'")
    with chdir(project):
        wheel: str = import_module(backend).build_wheel(str(folder))
    return folder / wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return tuple(build(project, tmp_path_factory.mktemp("wheel")) for project in (ROOT, *EXAMPLES))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, wheels: tuple[Path, ...]) -> Path:
    """The Python of a new venv that holds the wheels and sees this one's other packages.

    A path file adds this environment's site-packages as a plain folder: the path files in it, recpipe's
    editable install among them, have no effect there.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    )
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, *map(str, wheels)], check=True, capture_output=True, text=True)
    others = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "others.pth").write_text("\n".join(others), encoding="utf-8")
    for shim in (Path(folder) / "distutils-precedence.pth" for folder in others):
        if shim.exists():  # setuptools': Python 3.12 has no distutils, and the set for torch 2.11 asks for it
            shutil.copy(shim, site)
    return python


ONE_BY_ONE = """
import json, os, runpy, sys
import recpipe, recpipe_hotline
print(recpipe.__file__, recpipe_hotline.__file__)
for number, words in enumerate(json.loads(sys.argv[1])):
    for stream in (1, 2):
        os.dup2(os.open(f"{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["recpipe", *words]
    try:
        runpy.run_module("recpipe", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        with open("statuses", "a") as file:
            print(end.code, file=file)
        sys.stdout.flush()
"""
"""``python -m recpipe`` with several command lines, in one process: importing torch takes seconds."""


def outside() -> dict[str, str]:
    """The environment, without what would lead to this source tree."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HYDRA_FULL_ERROR")}
    return env | {"COLUMNS": "200"}


def test_wheel_holds_conf_and_plugins_and_nothing_else(wheels: tuple[Path, ...]) -> None:
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert {"recpipe/conf/train.yaml", "recpipe/py.typed", "recpipe/plugin/api.py"} <= set(names)
    assert "recpipe_hotline/conf/plugin/hotline.yaml" in names
    assert any(name.endswith(".j2") for name in names)
    top = {name.partition("/")[0] for name in names}
    assert all(n.startswith("recpipe") for n in top), top
    assert not any("/tests/" in name for name in names)


def test_it_runs_from_another_folder_with_a_third_party_plugin(fresh: Path, tmp_path: Path) -> None:
    tables = "data.tables={user: 300, item: 90, page: 20}"
    small = ["data.samples=1000", tables, "data.batch_size=64", "trainer.max_steps=5"]
    skipping = ["plugins.skip_small.least=1e-3", "trainer.progress=false", "task.page=false", *small]
    lines = [
        ["plugins"],
        ["+plugin=hello", "hydra.run.dir=out", "trainer.progress=false", *small],
        ["+plugin=hello", "plugins.hello.top=2", *small],
        ["+plugin=skip_small", "hydra.run.dir=resident", *skipping],
        ["+plugin=skip_small", "hydra.run.dir=tiers", "tiers.policy=lru", *skipping],
        ["+plugin=skip_small", "hydra.run.dir=shards", "tiers.sharded=true", *skipping],
    ]
    command = [str(fresh), "-c", ONE_BY_ONE, json.dumps(lines)]
    environment = outside() | {"NUMBA_DISABLE_JIT": "1"}  # compiling all loops anew takes 30 s
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert str(ROOT) not in done.stdout
    said = [[(tmp_path / f"{number}.{stream}").read_text() for stream in (1, 2)] for number in range(6)]
    assert (tmp_path / "statuses").read_text().split() == ["0", "0", "2", "0", "0", "0"], said
    listed, error = said[0][0], said[2][1]
    assert "hello" in listed
    assert "recpipe-hello 0.1.0" in listed
    assert "model=click_tower" in listed
    assert "hotline" in listed
    assert "broken:" not in listed
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["data"]["lookups"] == 5 * 64 * 3
    assert 0 < report["plugins"]["hello"]["distinct_rows"] <= 5 * 64 * 3
    assert 0 < report["plugins"]["hello"]["top_share"] < 1
    assert error == "error: plugins.hello.top=2: must be in (0, 1], for example 0.01\n"
    figures = [
        json.loads((tmp_path / place / "report.json").read_text(encoding="utf-8"))["plugins"]["skip_small"]
        for place in ("resident", "tiers", "shards")
    ]
    assert figures[0] == figures[1] == figures[2], "whatever holds the rows, the same ones are left out"
    assert 0.1 < figures[0]["skipped_share"] < 0.9


@pytest.mark.soak
def test_the_examples_own_tests_pass(fresh: Path, tmp_path: Path) -> None:
    command = [
        str(fresh),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-c",
        str(HELLO / "pyproject.toml"),
        "--rootdir",
        str(HELLO.parent),
        *(str(example / "tests") for example in EXAMPLES),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=outside(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_hello.py::test_counts_lookups" in done.stdout
    assert "test_tower.py::" in done.stdout
    assert "test_skip_small.py::" in done.stdout


@pytest.mark.parametrize("kind", MADE)
def test_the_wheel_of_a_new_package_brings_all_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project, site = write_starter(kind, "mine"), tmp_path / "site"
    group = kind if kind in GROUPS else PLUGIN
    with zipfile.ZipFile(build(project, tmp_path)) as wheel:
        wheel.extractall(site)
    shutil.rmtree(project)
    assert {path.name for path in site.iterdir()} == {"recpipe_mine", "recpipe_mine-0.1.0.dist-info"}
    assert (site / "recpipe_mine" / "conf" / group / "mine.yaml").is_file()
    with importable(site):
        ep = offered(group)["mine"]
        assert str(origin_of(ep)) == "mine (recpipe-mine 0.1.0)"
        row = listed(ep) if group == PLUGIN else describe_part(group, ep)
        assert row.doc
        assert not row.fault
        assert imported(group, ep).__module__ == "recpipe_mine"
        recipe = compose(["+plugin=mine" if group == PLUGIN else f"{group}=mine"])
        chosen = recipe.plugins if group == PLUGIN else [getattr(recipe, group).name]
        assert list(chosen) == ["mine"]


def test_requirements_agree_with_the_doctor() -> None:
    from recpipe.common.versions import TRIPLES
    from recpipe.tasks.doctor import REQUIREMENTS, minor

    for (torch, _), name in REQUIREMENTS.items():
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        pins = dict(line.split("==") for line in lines if "==" in line)
        fbgemm = pins.get("fbgemm-gpu") or pins["fbgemm-gpu-cpu"]
        assert (minor(pins["torch"]), minor(pins["torchrec"]), minor(fbgemm)) in TRIPLES
        assert minor(pins["torch"]) == torch


def test_a_plugin_in_the_tree_is_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["entry-points"].values()
    registered = {re.split(r"[.:]", value)[0] for group in groups for value in group.values()}
    assert registered - {"recpipe"} == {folder.name for folder in (ROOT / "plugins").glob("recpipe_*")}
