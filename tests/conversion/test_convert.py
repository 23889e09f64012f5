"""`subquad convert` from the command to the folder that it leaves."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from subquad.cli import main

OPTIONS = {
    "llp": "segment=8",
    "window": "width=6",
    "linear": "",
    "latte_macchiato": "width=6",
}


@pytest.mark.parametrize("attention", OPTIONS)
@pytest.mark.parametrize("keep_every", [0, 2])
def test_a_conversion_leaves_a_model_that_loads_and_generates(flags, tmp_path, capsys, attention, keep_every):
    command = flags(attention, "--keep_every", str(keep_every), option=OPTIONS[attention])
    assert main(command) == 0
    print(capsys.readouterr().out)
    folder = tmp_path / "out"
    print(sorted(p.name for p in folder.iterdir()))
    report = json.loads((folder / "report.json").read_text())
    print(report)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generate(torch.tensor([[1, 4, 5]]), max_new_tokens=5, do_sample=False)
