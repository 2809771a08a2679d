"""The site: ``python -m sphinx -W docs docs/_build/html`` in the repository root makes it, with no network.

Its packages: ``pip install -e '.[docs]'``. The pages are plain markdown, which GitHub shows as well.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "plugins")]

from outside import connect  # noqa: E402
from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: E402

import recpipe  # noqa: E402
from recpipe.common.process import quiet_libraries  # noqa: E402

quiet_libraries()
import recpipe.kit  # noqa: E402  and what it imports, before Sphinx turns logging up

project = "recpipe"
version = release = recpipe.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"recpipe {version}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

myst_heading_anchors = 4
"""Headings can be linked to as on GitHub."""
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]
"""The README's figures, included without the heading above theirs."""

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True}
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100


def sections(app, what, name, thing, options, lines):
    """``Args:`` and its like; of attributes napoleon would take what is before a colon for a type."""
    if what in ("class", "function", "method"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, thing, options).lines()


def setup(app):
    connect(app)
    app.connect("autodoc-process-docstring", sections)
