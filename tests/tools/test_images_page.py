"""What docs/images.md shows is run, or parsed where it needs a trained model."""

import re
import shlex
from pathlib import Path

import torch

from subquad.bench import images
from subquad.tools import complete, generate
from subquad.tools.train import read_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
PARSERS = {"generate": generate.make_parser, "complete": complete.make_parser, "bench": images.make_parser}


def test_the_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict = {}
    with torch.random.fork_rng():
        exec(code, found)  # noqa: S102 (our own page)
    assert found["drawn"].shape == (3, 64)
    assert (found["completed"][:, :32] == found["drawn"][:, :32]).all()


def test_the_commands_parse():
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines]
    assert [words[0] for words in commands] == ["train", "generate", "complete", "bench"]
    for name, *words in commands:
        if name == "train":
            assert read_config(words).image.path == "FOLDER"
        else:
            PARSERS[name]().parse_args(words[1:] if name == "bench" else words)
