"""The data sets of the experiments, from `experiments/data.yaml`: what each is, its source, sizes and checksums.

`docs/data.md` and the line about data in each experiment's README.md are written from here. Does not import torch.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.recipe import SCALES, Recipe, merged
from subquad.config import Config, read_mapping

FILE = Path(__file__).parents[1] / "data.yaml"
PAGE = "docs/data.md"
LITTLE = "little"
"""A text that comes with Python: the modules of its package `email`."""
HUB = "hf:"
WIDTH = 120
TO_PAGE = "../../docs/data.md"
"""The page, seen from the folder of an experiment."""
TO_HUB = f"[hub]({TO_PAGE}#from-the-hugging-face-hub)"
NONE = "none: the program makes it"
ADDRESS = re.compile(r"https://[^\s,;]*[^\s,;.]")


@dataclass(frozen=True, kw_only=True)
class Listed(Config):
    """A file of a data set, unpacked."""

    name: str
    """Its path in the folder of the data set."""
    bytes: int
    sha256: str
    url: str = ""
    """Where it is fetched from, packed or not (empty: it is not fetched)."""
    begins: str = ""
    """The file is the part of what arrives that begins so (empty: all of it)."""


@dataclass(frozen=True, kw_only=True)
class DataSet(Config):
    """A data set that recipes write as `@NAME/...`."""

    folder: str
    """Its folder in SUBQUAD_DATA."""
    holds: str
    """Its contents, for error messages."""
    parts: list[str] = field(default_factory=list)
    """Names of its parts; a single file or a hub data set can only stand for one of them."""
    what: str
    source: str
    terms: str
    files: list[Listed]

    @property
    def fetched(self) -> bool:
        """Return whether all files have an address."""
        return all(file.url for file in self.files)


DATA: dict[str, DataSet] = {name: DataSet.from_dict(values) for name, values in read_mapping(FILE).items()}


def asked(recipe: Recipe, scale: str) -> list[str]:
    """Return the paths `@NAME/...` and `hf:...` in the settings of a scale's arms, sorted."""
    chosen, arms = recipe.scale(scale), recipe.arms_of(scale)
    found: set[str] = set()
    for name, arm in arms.items():
        settings = merged(recipe.settings, chosen.settings, arm.settings, chosen.arm_settings.get(name, {}))
        found |= {value for value in _strings(settings) if value.startswith(("@", HUB))}
    return sorted(found)


def told(recipe: Recipe) -> str:
    """Return the sentence about an experiment's data, with links to the page, for its README.md."""
    if recipe.reads:
        return f"Data: the result of [{recipe.reads}](../{recipe.reads}), whose page names its own data."
    scales: dict[str, list[str]] = {}
    for scale in SCALES:
        if scale in recipe.scales:
            names = dict.fromkeys(_linked(path) for path in asked(recipe, scale))
            scales.setdefault(" and ".join(names) or NONE, []).append(f"`{scale}`")
    if list(scales) == [NONE]:
        return f"Data: {NONE}."
    parts = [
        f"{what} ({'scale' if len(which) == 1 else 'scales'} {', '.join(which)})" for what, which in scales.items()
    ]
    return f"Data: {'; '.join(parts)}. [The page of the data]({TO_PAGE}) has sources, sizes and checksums."


def page() -> str:
    """Return the text of `docs/data.md`."""
    parts = [HEAD]
    for name, one in DATA.items():
        size = sum(file.bytes for file in one.files)
        get = f"`python -m experiments --fetch {name}`" if one.fetched else "by hand, from its source"
        lines = ["| file | bytes | SHA-256 |", "|:---|---:|:---|"]
        lines += [f"| `{file.name}` | {file.bytes:,} | `{file.sha256}` |" for file in one.files]
        facts = [
            f"- **Source:** {one.source}",
            f"- **Terms:** {one.terms}",
            f"- **To get it:** {get}; {size:,} bytes in all.",
            f"- **Its folder in `SUBQUAD_DATA`:** `{one.folder}/`. What it takes: {one.holds}.",
        ]
        parts += [f"## {name}", _wrapped(one.what), "\n".join(_wrapped(fact, "  ") for fact in facts), "\n".join(lines)]
    return "\n\n".join([*parts, TAIL]) + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    text = ADDRESS.sub(r"<\g<0>>", text)
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _strings(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _strings(value)
    elif isinstance(values, list):
        for value in values:
            yield from _strings(value)


def _linked(path: str) -> str:
    if path.startswith(HUB):
        return f"`{path.removeprefix(HUB).partition(':')[0]}` ({TO_HUB})"
    name = path.removeprefix("@").partition("/")[0]
    return f"[{name}]({TO_PAGE}#{name})"


HEAD = """\
# The data of the experiments

Every data set that the [experiments](../experiments) read: its source, its size and its SHA-256. The README of each
experiment links its own. This page is written from `experiments/data.yaml` by
`python -m experiments --data_page docs/data.md`.

```console
python -m experiments --fetch tinyshakespeare mnist      # fetch, check the SHA-256, keep in the cache
python -m experiments nano_perceiver                     # finds what was fetched
python -m experiments linear_mnist --data mnist=PATH     # or a copy of your own
```

- **Where data is looked for:** `--data NAME=PATH`, then the folder `SUBQUAD_DATA`, then what `--fetch` has kept, in
  `SUBQUAD_CACHE` (by default `~/.cache/subquad`). Files may be packed as `.xz`, `.gz` or `.bz2`, and a whole set may be
  a tar archive. If data is missing, the command stops before it begins, and says what to do.
- **What is checked:** a file that is fetched is refused unless its SHA-256 is the one below. Each run says whether it
  reads the files of this page or others: then its figures don't compare with the committed ones. The tests fetch from a
  server of their own, not from the addresses in `experiments/data.yaml`, which may have moved since.
- **Substitutes:** `enwiki`, `cifar10` and `acl` stand for data sets that could not be had, as their sections say.
- **The scale `smoke` needs none of them:** it reads the text [little](#little) or makes its data.

Sizes and checksums are those of the unpacked files."""
TAIL = """\
## little

The modules of the package `email` that comes with Python, a few hundred kilobytes. The scale `smoke` reads them in the
place of real text, to show that a recipe runs. They differ from one version of Python to the next, so they have no
checksum, and no figure of them is a result.

## From the Hugging Face hub

Scale `paper` reads some data sets by name, `hf:NAME`, through the package `datasets`: WikiText-103
(`Salesforce/wikitext`), PG-19 (`emozilla/pg19`), OpenWebText (`Skylion007/openwebtext`), RedPajama's sample
(`togethercomputer/RedPajama-Data-1T-Sample`) and the reviews of IMDB (`imdb`). No committed result has read them, so
no size or checksum is given. `enwik8` has to be given by `--data enwiki=PATH`.

## Made by a program

ListOps and Pathfinder follow the generators of [Long Range Arena](lra.md#the-data); recall, random bytes and random
sequences are drawn from the seeds of the recipes. The same seed makes the same data."""
