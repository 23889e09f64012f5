"""Settings of Sphinx for the site, whose pages `docs/make_site.py` lays out. `make docs` runs both."""

import inspect
import re
from typing import Any

from sphinx.ext import napoleon
from sphinx.util.inspect import stringify_signature

from subquad.config import Config
from subquad.options import options

project = html_title = "subquad"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
default_role = "code"
highlight_language = "text"
myst_heading_anchors = 4
myst_disable_syntax = ["myst_line_comment"]  # a line may begin with "%"
myst_fence_as_directive = ["math"]
mathjax_path = "tex-svg.js"  # one file, with its letters; no page loads anything from elsewhere

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # transformers' are not ours

html_theme = "furo"
html_static_path = ["site.css", "../build/npm/node_modules/mathjax/es5/tex-svg.js"]
html_css_files = ["site.css"]
smartquotes = html_copy_source = html_show_copyright = html_show_sphinx = html_domain_indices = False  # -- stays --


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
    lines[:] = napoleon.GoogleDocstring(lines, napoleon.Config()).lines()


def name_options(app: Any, what: str, name: str, value: Any, _: Any, given: str | None, type_: Any) -> tuple[str, Any]:
    """Return the fields of a configuration as its parameters, `...` for a made default; forget a returned None."""
    types = app.env.current_document.autodoc_annotations.get(name, {})
    types.pop("return" if types.get("return") == "None" else "", None)
    if what == "class" and issubclass(value, Config):
        given = stringify_signature(inspect.signature(value), show_annotation=False)
    return (re.sub(r"<function (\w+)>", r"\1", given.replace("<factory>", "...")), type_) if given else None
