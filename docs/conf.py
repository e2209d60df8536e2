"""How Sphinx builds this folder into a site: `make docs`."""

from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx

import fastattn

project = "fastattn"
author = "the fastattn authors"
release = version = fastattn.__version__
copyright = "the fastattn authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_static", "pictures"]
# GitHub's names of headings, so that links to them work in the files as they lie, too.
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures show them in full, and docstrings say what is meant
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
nitpicky = False

html_theme = "furo"
html_title = f"fastattn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True


def mathml(text: str, block: bool) -> str:
    """A formula as MathML, which browsers draw without a script or a network."""
    text = text.replace(r"\dots", r"\ldots")
    aligned = f"\\begin{{aligned}}{text}\\end{{aligned}}" if "&" in text else text
    return latex2mathml.tex2mathml(aligned, as_block=block)


def visit_inline(writer, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def visit_block(writer, node: nodes.math_block) -> None:
    writer.body.append(mathml(node.astext(), block=True))
    raise nodes.SkipNode


# Files of the repository's root that are pages here, as links in them and to them name them.
PAGES = {"DESIGN.md": "design", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}


def to_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Makes links to such files links to their pages."""
    for link in doctree.findall(addnodes.pending_xref):
        page = PAGES.get(Path(link["reftarget"]).name)
        if page is not None:
            link.attributes |= dict(refdomain="doc", reftarget=page, reftargetid=None)


def without_unknown(app, what, name, thing, options, signature, returned) -> tuple | None:
    """Hides the argument that catches unknown keywords."""
    return signature and (signature.replace(", **_unknown", ""), returned)


def setup(app: Sphinx) -> None:
    """Registers the renderer of formulas, and what happens to links and signatures."""
    app.connect("autodoc-process-signature", without_unknown)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("doctree-read", to_pages)


html_math_renderer = "mathml"
