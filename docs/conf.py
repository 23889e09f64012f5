"""Settings of Sphinx for the site, whose pages `docs/make_site.py` lays out. `make docs` runs both."""

import inspect
from typing import Any

from sphinx.ext.napoleon import Config as Napoleon
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.inspect import stringify_signature

from subquad.config import Config
from subquad.options import options

project = html_title = "subquad"
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
default_role = "code"
highlight_language = "text"
smartquotes = False  # it would change the dashes of options
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
mathjax_path = "tex-svg.js"  # one file, with its letters; no page loads anything from elsewhere

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # transformers' are not ours

html_theme = "furo"
html_static_path = ["site.css", "../build/npm/node_modules/mathjax/es5/tex-svg.js"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False


def setup(app: Any) -> None:
    """Connect how docstrings and signatures are shown."""
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", name_options)


def describe(_: Any, what: str, name: str, value: Any, settings: Any, lines: list[str]) -> None:
    """Show `Args:`, the fields of a configuration and the options of a mechanism as parameters."""
    if what == "data":
        lines.clear()  # it is the docstring of the value's class; `make_site.py` adds the constant's own
    if what in ("attribute", "data", "property"):
        return  # a colon within a sentence is no type, as it would be for napoleon
    config = getattr(value, "Config", value)
    if what == "class" and issubclass(config, Config):
        end = lines.index("Options:") if "Options:" in lines else len(lines)
        lines[end:] = ["", *(f":param {field}: {meaning}" for field, _, _, meaning in options(config) if meaning), ""]
    lines[:] = GoogleDocstring(lines, Napoleon()).lines()


def name_options(_: Any, what: str, name: str, value: Any, *given: Any) -> tuple[str, str] | None:
    """Return the fields of a configuration as its parameters: its constructor takes any names, to refuse the wrong."""
    if what == "class" and issubclass(value, Config):
        return stringify_signature(inspect.signature(value), show_annotation=False).replace("<factory>", "..."), ""
