"""Lay out the pages of the site for Sphinx: `python docs/make_site.py FOLDER`, which `make docs` calls.

Pages of the repository are copied, with links to where each page stands in the site. The site alone has the package's
reference, which autodoc writes from docstrings; the commands with their help; and a page for each linked source file.
"""

import importlib
import inspect
import io
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

from pages import ROOT, table

from subquad import cli, program
from subquad.attention import Attention
from subquad.cli.show import PICTURES
from subquad.config import Config
from subquad.ops.patterns import Pattern

PAGES = ("*.md", "docs/**/*.md", "experiments/**/*.md", "benchmarks/**/*.md")
IMAGES = ("docs/images/*.png", "experiments/*/*.png")
LINK = re.compile(r"^```.*?^```|\]\((?P<file>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| \[[^]]+\]\((?P<page>[^)#]+\.md)\)", re.MULTILINE)
SECTION = re.compile(r"^## (?P<title>.*)\n(?P<body>(?:(?!##).*\n?)*)", re.MULTILINE)
SHOWN = {"markdown": "{}", "code": "```python\n{}\n```"}  # the cells of a notebook
MADE = """\
| [The package](reference/index.md) | Every public function and class, from its docstring; {ref}`by name <genindex>` |
| [The command line](commands/index.md) | Every command and its options, from its own help |
"""
ROOMS = """adaptation attention data evaluation evaluation.audit generation hf models ops ops.patterns parallel recipes
serving testing train_and_report training"""
MODULES = ("subquad", *(f"subquad.{room}" for room in ROOMS.split()))
ACTIONS = {"data": ("tokens", "check"), "lora": ("list", "merge"), "show": tuple(PICTURES)}  # commands within commands


def place(file: Path) -> str:
    """Return the path in the site of a file of the repository, or of a folder's README.md."""
    path = (file / "README.md" if file.is_dir() else file).relative_to(ROOT).as_posix()
    if path == "README.md":
        return "overview.md"
    path = path.removeprefix("docs/").replace("README.md", "index.md")
    return path if path.endswith((".md", ".png")) else f"{path}.md"


def copied() -> dict[str, str]:
    """Return the text of each page of the repository, and of a page for each source file that one links to."""
    texts = {}
    for source in sorted(file for pattern in PAGES for file in ROOT.glob(pattern)):
        text, here = source.read_text(encoding="utf-8").replace("# subquad\n", "# subquad: overview\n"), place(source)
        if text.startswith("## "):  # it is a section of another page
            text = text.removeprefix("#")  # and its further sections are below it
        texts[here] = LINK.sub(lambda link: moved(link, source, here), text)  # noqa: B023 called here
        for link in LINK.finditer(text):
            file = (source.parent / (link["file"] or "")).resolve()
            if file.suffix == ".py":
                texts[place(file)] = f"# {file.name}\n\n```python\n{file.read_text(encoding='utf-8')}```\n"
            elif file.suffix == ".ipynb":
                cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
                page = "\n\n".join(SHOWN[cell["cell_type"]].format("".join(cell["source"])) for cell in cells)
                texts[place(file)] = LINK.sub(lambda link: moved(link, file, place(file)), page)  # noqa: B023
    return texts


def moved(link: re.Match[str], source: Path, here: str) -> str:
    """Return a link in the file `source` as it is on the page `here`; a block of code stays as it is."""
    if link["file"] is None:
        return link[0]
    target = os.path.relpath(place((source.parent / link["file"]).resolve()), os.path.dirname(here))
    return f"]({target}{link['anchor'] or ''})"


def reference() -> dict[str, str]:
    """Return a page for each public module, with its docstring and its public names, and their list."""
    texts, lines = {}, []
    for name in MODULES:
        module = importlib.import_module(name)
        names = [part for part in module.__all__ if not inspect.ismodule(getattr(module, part))]
        parts = [f"# {name}", directive("automodule", name), *(member(name, part) for part in names), ""]
        texts[f"reference/{name}.md"] = "\n".join(parts)
        lines.append((f"[{name}]({name}.md)", module.__doc__.partition("\n")[0]))
    return texts | {"reference/index.md": f"# The package\n\n{table(('module', 'what it holds'), lines, names=2)}\n"}


def member(package: str, name: str) -> str:
    """Return the directive of a public name; fields are a class's parameters, a mechanism's methods its base's."""
    value, full = getattr(importlib.import_module(package), name), f"{package}.{name}"
    if not inspect.isclass(value):
        return directive("autofunction", full) if callable(value) else directive("autodata", full, "", meaning(full))
    if issubclass(value, (Attention, Pattern)) and value not in (Attention, Pattern):
        return directive("autoclass", full)
    fields = value.__dataclass_fields__ if issubclass(value, Config) else getattr(value, "_fields", ())
    return directive("autoclass", full, ":members:", f":exclude-members: {', '.join(['Config', *fields])}")


def meaning(constant: str) -> str:
    """Return the string below the assignment of a constant, wherever in its package that stands."""
    package, _, name = constant.rpartition(".")
    below = re.compile(rf'^{name} = .*\n"""(.*?)"""$', re.MULTILINE | re.DOTALL)
    sources = [file.read_text(encoding="utf-8") for file in ROOT.joinpath(*package.split(".")).rglob("*.py")]
    (text,) = (found[1] for source in sources for found in below.finditer(source))
    return text


def directive(kind: str, name: str, *options: str) -> str:
    """Return a directive of Sphinx."""
    return "\n".join(["", "```{eval-rst}", f".. {kind}:: {name}", *(f"   {option}" for option in options), "```"])


def commands() -> dict[str, str]:
    """Return a page for each command with its help, and one for all."""
    texts = {"commands/index.md": f"# The command line\n\n{help_of()}"}
    for command in cli.COMMANDS:
        every = [(command,), *((command, action) for action in ACTIONS.get(command, ()))]
        helps = [f"{'#' * len(words)} subquad {' '.join(words)}\n\n{help_of(*words)}" for words in every]
        texts[f"commands/{command}.md"] = "\n".join(helps)
    return texts


def help_of(*words: str) -> str:
    """Return what a command prints with `--help`, with `subquad` and `pip` for this program's way to start them."""
    out, python = io.StringIO(), program.command().removesuffix("-m subquad")
    with redirect_stdout(out), suppress(SystemExit):
        cli.main([*words, "--help"])
    text = out.getvalue().replace(f"{python}-m subquad", "subquad").replace(f"{python}-m pip", "pip").replace(" \b", "")
    return f"```text\n{text}```\n"


def with_contents(texts: dict[str, str]) -> dict[str, str]:
    """Return the pages with the sidebar's contents: the pages of the index's tables, and those of each folder."""
    head = "## Reference\n\n| page | what it holds |\n|:---|:---|\n"
    texts = texts | {"index.md": texts["index.md"].replace(head, head + MADE)}
    trees = [("index.md", title, ROW.findall(body)) for title, body in SECTION.findall(texts["index.md"])]
    order = sorted(texts, key=os.path.splitext)  # `subquad` before `subquad.attention`
    for name in [name for name in order if name.endswith("/index.md")]:
        inside = re.compile(name.removesuffix("index.md") + r"[^/]+(/index)?\.md")
        trees.append((name, "Pages", [page for page in order if inside.fullmatch(page) and page != name]))
    for name, caption, below in trees:
        entries = [os.path.relpath(page, os.path.dirname(name)) for page in below]
        if below:
            texts[name] += "\n".join(["\n```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```\n"])
    listed = {"index.md", *(page for _, _, below in trees for page in below)}
    return {name: text if name in listed else f"---\norphan: true\n---\n{text}" for name, text in texts.items()}


def main(folder: Path) -> None:
    """Write all pages and pictures to `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {name: text.encode() for name, text in with_contents(copied() | reference() | commands()).items()}
    files |= {place(image): image.read_bytes() for pattern in IMAGES for image in ROOT.glob(pattern)}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "90"
    main(Path(sys.argv[1]))
