"""docs/ as a site: every warning is an error, and what is built asks nothing of the network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, SOURCE

LOADED = re.compile(
    r"""<(?:script|img|iframe|source|embed|video|audio)\b[^>]*?\b(?:src|srcset)=["']?\s*(?:https?:)?//"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|license|author))[^>]*?\bhref=["']?\s*(?:https?:)?//""",
    re.IGNORECASE,
)
"""What a browser would load from elsewhere with a page; links that a reader follows are none of it."""
STYLED = re.compile(r"""(?:url\(|@import)\s*["']?\s*(?:https?:)?//""", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="the site's packages are not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-d",
            folder / "trees",
            "docs",
            folder / "html",
        ],
        cwd=ROOT,
        env={"PYTHONPATH": SOURCE, "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_page_is_built_without_a_warning(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        if "_build" not in page.parts:
            assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


def test_files_of_the_repository_are_shown(site: Path) -> None:
    page = (site / "guide.html").read_text(encoding="utf-8")
    assert 'href="files/recpipe/run.py.html"' in page
    assert "def run(" in re.sub(r"<[^>]+>", "", (site / "files/recpipe/run.py.html").read_text("utf-8"))


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    index = site / "_modules" / "index.html"  # Sphinx's own: it also lists the builtins that values are of
    for page in [page for page in site.rglob("*.html") if page != index]:
        for target in re.findall(r'href="(?![a-z]+:|#)([^"#?]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(site)}: {target}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not LOADED.search(page.read_text(encoding="utf-8")), page.relative_to(site)
    for sheet in site.rglob("*.css"):
        assert not STYLED.search(sheet.read_text(encoding="utf-8")), sheet.relative_to(site)


@pytest.mark.parametrize(
    ("code", "loads"),
    [
        ('<script defer src="https://cdn.example/x.js">', True),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<a href="https://example.org">', False),
        ('<script src="_static/x.js">', False),
    ],
)
def test_what_counts_as_loaded(code: str, loads: bool) -> None:
    assert bool(LOADED.search(code)) is loads
