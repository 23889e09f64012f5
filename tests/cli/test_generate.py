"""`subquad generate` with a Perceiver AR, which can go on in more than one way."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.cli import main
from subquad.hf import SubquadConfig, SubquadForCausalLM

VOCABULARY, LATENTS, PROMPT = 23, 5, 9
PERCEIVER = {"latents": LATENTS, "history": "self", "history_tokens": 6}


def save(folder, attention, options):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.5}
    config = SubquadConfig(**shape, attention=attention, options={attention: options})
    SubquadForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    save(folder / "llp", "llp", {"segment": 8})
    save(folder / "exact", "perceiver_ar", PERCEIVER)
    save(folder / "refill", "perceiver_ar", {**PERCEIVER, "decode": "refill"})
    save(folder / "frozen", "perceiver_ar", {**PERCEIVER, "decode": "frozen"})
    return folder


def text(capsys, folder, *arguments, tokens=12):
    capsys.readouterr()
    prompt = " ".join(f"w{i}" for i in range(PROMPT))
    command = ["generate", str(folder), "--prompt", prompt, "--temperature", "0", "--max_tokens", str(tokens)]
    assert main([*command, *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_goes_on_in_the_mode_that_is_named(runs, capsys):
    exact, refill = text(capsys, runs / "exact"), text(capsys, runs / "refill")
    assert exact != refill
    assert text(capsys, runs / "exact", "--decode", "refill") == refill
    assert text(capsys, runs / "refill", "--decode", "exact") == exact
    assert text(capsys, runs / "exact", "--decode", "refill", "--refill", "2") == refill
    assert text(capsys, runs / "refill", "--refill", "4") == text(
        capsys, runs / "exact", "--decode", "refill", "--refill", "4"
    )


def test_frozen_ends_with_a_warning_where_its_latents_do(runs, capsys, caplog):
    short = text(capsys, runs / "frozen", tokens=3)
    assert not caplog.records
    assert text(capsys, runs / "frozen") == short
    assert "ends after 3 tokens instead of max_tokens=12: decode=frozen has no latents for more" in caplog.text
    assert len(text(capsys, runs / "frozen", "--refill", "1").split()) == PROMPT + 4
    assert text(capsys, runs / "frozen", "--samples", "2").count(short) == 2
    assert main(["generate", str(runs / "frozen"), "--prompt", "w1 w2 w3", "--beams", "2"]) == 0
    assert text(capsys, runs / "frozen", "--decode", "exact") == text(capsys, runs / "exact")


@pytest.mark.parametrize(("run", "arguments", "match"), [
    ("llp", ["--decode", "refill"], "decode is for perceiver_ar, and this model has attention='llp'"),
    ("llp", ["--refill", "2"], "refill is for perceiver_ar, and this model has attention='llp'"),
    ("exact", ["--refill", "2"], "refill=2 has no effect with decode='exact'; leave it out"),
    ("exact", ["--decode", "refill", "--refill", "6"], "refill must be at most latents, got refill=6, latents=5"),
    ("exact", ["--decode", "thaw"], "exact"),
])  # fmt: skip
def test_a_mode_that_does_not_fit_is_refused_before_any_text(runs, capsys, run, arguments, match):
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", str(runs / run), "--prompt", "w1 w2", *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert match in captured.err
    assert captured.out == ""
