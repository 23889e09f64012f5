"""What `make docs` lays out for Sphinx, without Sphinx: links, the sidebar, the package's reference, the commands."""

import importlib
import os
import re
from pathlib import Path

import pytest

from subquad import cli
from tests.test_public_api import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.together
ADDRESS = re.compile(r"https?://(?!localhost)[^\s)>`\"\]]+")
TOCTREE = re.compile(r"```\{toctree\}\n:hidden:\n:caption: ([^\n]*)\n\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def site():
    """The module `docs/make_site.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("make_site")


@pytest.fixture(scope="module")
def pages(site) -> dict[str, str]:
    """The pages of the repository and of the reference, with their tables of contents."""
    overview = {"commands/index.md": "# The command line\n"}
    return site.with_contents(site.copied() | site.reference() | overview)


def to(page: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), target))


def test_every_link_leads_to_a_page_or_a_picture_of_the_site(site, pages):
    pictures = {site.place(file) for pattern in site.IMAGES for file in ROOT.glob(pattern)}
    targets = [
        (page, to(page, link["file"]))
        for page, text in pages.items()
        for link in site.LINK.finditer(text)
        if link["file"]
    ]
    assert len(targets) > 400
    assert [(page, target) for page, target in targets if target not in pages.keys() | pictures] == []


def test_every_page_is_once_in_the_sidebar_or_says_that_it_is_not(pages):
    shown = [
        to(page, entry) for page, text in pages.items() for _, below in TOCTREE.findall(text) for entry in below.split()
    ]
    assert len(shown) == len(set(shown))
    apart = {page for page, text in pages.items() if text.startswith("---\norphan: true\n")}
    assert apart | set(shown) | {"index.md"} == set(pages)
    assert apart.isdisjoint(shown)
    lost = [page for page in apart if not page.startswith(("examples/", "benchmarks/"))]
    assert lost == [], "give each of them a row in docs/README.md"
    captions = [caption for caption, _ in TOCTREE.findall(pages["index.md"])]
    assert captions == ["Start", "How-to", "Reference", "Explanation", "Development"]


def test_code_keeps_its_text(site):
    page = ROOT / "README.md"
    text = "[a](docs/guide.md#the-top)\n```python\nx[0](docs/guide.md)\n```\n[b](https://some.org) [c](#here)"
    moved = site.LINK.sub(lambda link: site.moved(link, page, "folder/page.md"), text)
    assert moved == text.replace("[a](docs/guide.md", "[a](../guide.md")


def test_a_section_of_another_page_becomes_a_page_of_its_own(pages):
    assert pages["experiments/wrong.md"].startswith("# Errors in the papers")


def test_the_reference_has_every_public_name(site, pages):
    assert set(site.MODULES) == set(PACKAGES)
    for package in PACKAGES:
        module, page = importlib.import_module(package), pages[f"reference/{package}.md"]
        for name in module.__all__:
            value = getattr(module, name)
            assert hasattr(value, "__all__") or f":: {package}.{name}\n" in page, f"{package}.{name}"
    assert ".. autodata:: subquad.__version__\n   \n   The version of the package" in pages["reference/subquad.md"]
    assert ":exclude-members: Config, max_tokens, temperature" in pages["reference/subquad.generation.md"], "fields"


def test_each_command_shows_its_help(site, monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", {name: cli.COMMANDS[name] for name in ("cost", "lora")})
    made = site.commands()
    assert list(made) == ["commands/index.md", "commands/cost.md", "commands/lora.md"]
    assert "```text\nusage: subquad COMMAND [options]\n" in made["commands/index.md"]
    assert "\n  subquad train --recipe stdlib-llp\n" in made["commands/index.md"], "as it is typed"
    assert made["commands/cost.md"].startswith("# subquad cost\n\n```text\nusage: subquad cost")
    assert "## subquad lora merge\n\n```text\nusage: subquad lora merge" in made["commands/lora.md"]


def test_a_linked_notebook_becomes_a_page(pages):
    page = pages["examples/notebooks/audit.ipynb.md"]
    assert "\n# Audit a model\n" in page
    assert "](../../auditing.md)" in page, "links of its cells lead to the site's pages"
    assert page.count("\n```python\n") == 7, "its cells of code"


@pytest.mark.slow
def test_every_command_has_a_help(site):
    made = site.commands()
    assert len(made) == len(cli.COMMANDS) + 1
    for name, page in made.items():
        assert page.count("```text\nusage: subquad ") == page.count("```text\n"), name


def test_every_picture_is_described(pages):
    for page, text in pages.items():
        for words in re.findall(r"!\[([^]]*)\]", text):
            assert len(words.split()) >= 4, f"{page}: {words}"


def test_addresses_outside_are_listed():
    """No test opens them; `docs/external_links.txt` says when somebody last did."""
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    texts = [file.read_text(encoding="utf-8") for file in (*files, *(ROOT / "docs").rglob("*.md"))]
    found = {address.rstrip(".,;") for text in texts for address in ADDRESS.findall(text)}
    lines = (ROOT / "docs" / "external_links.txt").read_text(encoding="utf-8").splitlines()
    assert re.search(r"\d{4}-\d\d-\d\d", lines[0])
    listed = {line for line in lines if not line.startswith("#")}
    assert found - listed == set(), "not in the list"
    assert listed - found == set(), "on no page"
