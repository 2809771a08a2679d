"""The site: ``python -m sphinx -W docs docs/_build/html`` in the repository root makes it, with no network.

Its packages: ``pip install -e '.[docs]'``. The pages are plain markdown, which GitHub shows as well.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "plugins")]

from outside import connect  # noqa: E402

import recpipe  # noqa: E402
from recpipe.common.quiet import quiet_libraries  # noqa: E402

quiet_libraries()
import recpipe.kit  # noqa: E402  and what it imports, before Sphinx turns logging up

project = "recpipe"
version = release = recpipe.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
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
autodoc_default_options = {"members": True, "show-inheritance": True, "inherited-members": False}
python_use_unqualified_type_names = True
maximum_signature_line_length = 100


def setup(app):
    connect(app)
