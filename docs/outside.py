"""Links from the site's pages to files of the repository that are no pages: the site shows these files too.

On GitHub such a link opens the file. Here a README that a page includes is that page, and any other file
becomes a page with its text, so that a reader stays in the site and needs no network.
"""

import os
import re
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
INCLUDE = re.compile(r"^```\{include\} (\S+)", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def connect(app):
    app.connect("source-read", page_read)
    app.connect("include-read", file_included)
    app.connect("doctree-read", show_files, priority=100)  # before Sphinx copies them to be downloaded
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", file_pages)


def included():
    """The pages that include a file, by that file."""
    pages = {}
    for page in DOCS.rglob("*.md"):
        for target in INCLUDE.findall(page.read_text(encoding="utf-8")):
            pages[(page.parent / target).resolve()] = page
    return pages


def page_read(app, docname, source):
    source[0] = relinked(source[0], DOCS / docname, DOCS / docname)


def file_included(app, path, docname, content):
    content[0] = relinked(content[0], DOCS / path, DOCS / app.env.docname)


def relinked(text, of, page):
    """``text`` of the file ``of`` with links as they are from ``page``, and READMEs' pages for READMEs."""
    pages = included()

    def link(found):
        target = (of.parent / found[1]).resolve()
        if not target.exists():
            return found[0]  # Sphinx says so
        place = os.path.relpath(pages.get(target, target), page.parent)
        if target.suffix == ".md" and target not in pages and not target.is_relative_to(DOCS):
            return f"](path:{place})"  # as any other file, and not as a page, which it is not
        return f"]({place}{found[2] or ''})"

    return LINK.sub(link, text)


def shown(app):
    """Files that pages link to, by page."""
    if not hasattr(app.env, "shown_files"):
        app.env.shown_files = {}
    return app.env.shown_files


def forget(app, env, docname):
    shown(app).pop(docname, None)


def show_files(app, doctree):
    """Links that Sphinx would make into downloads lead to the files' pages."""
    docname = app.env.docname
    for node in list(doctree.findall(addnodes.download_reference)):
        file = (DOCS / docname).parent.joinpath(node["reftarget"]).resolve()
        name = file.relative_to(ROOT).as_posix()
        shown(app).setdefault(docname, set()).add(name)
        uri = app.builder.get_relative_uri(docname, f"files/{name}")
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def file_pages(app):
    for name in sorted(set().union(*shown(app).values())):
        text = (ROOT / name).read_text(encoding="utf-8")
        try:
            lexer = get_lexer_for_filename(name)
        except ClassNotFound:
            lexer = TextLexer()
        code = highlight(text, lexer, HtmlFormatter())
        yield f"files/{name}", {"title": name, "body": f"<h1>{name}</h1>\n{code}"}, "page.html"
