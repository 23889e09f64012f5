"""What a conversion starts from."""

import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from subquad.adaptation.source import fingerprint, load_source
from subquad.cli import main
from subquad.testing import assert_exact
from tests.adaptation.models import WORDS

SIZES = {"vocab_size": len(WORDS) + 4, "bos_token_id": 1, "eos_token_id": 2}


def theirs(family):
    torch.manual_seed(0)
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=40))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **shape, **heads, tie_word_embeddings=True, pad_token_id=None))


@pytest.mark.parametrize(
    ("family", "attention", "option"), [("gpt2", "latte_macchiato", "width=6"), ("qwen3", "linear", "")]
)
def test_a_model_of_transformers_is_imported_on_the_way(flags, original, tmp_path, capsys, family, attention, option):
    model, folder = theirs(family), tmp_path / "theirs"
    model.save_pretrained(folder)
    shutil.copyfile(original / "tokenizer.json", folder / "tokenizer.json")
    source = load_source(folder)
    assert {name: getattr(source.model.config, name) for name in SIZES} == SIZES
    more = ["--keep_every", "2", "--measure.contexts", "[8,32,64]"]
    assert main(flags(attention, *more, model=folder, option=option)) == 0
    shown = capsys.readouterr().out
    assert "the kept layers' keys and values go on growing" in shown
    assert ("\n 64 " in shown) == (family == "qwen3"), "contexts that learned positions do not reach are left out"
    sizes = ["--tokens", "12", "--long", "16", "--contexts", "[8,16]", "--repeats", "1"]
    assert main(["audit", str(tmp_path / "out"), *sizes]) == 0


def test_a_fingerprint_is_of_the_weights(original):
    source, again = load_source(original), load_source(original)
    assert source.decoder is not again.decoder
    assert fingerprint(source.decoder) == fingerprint(again.decoder)
    for name, weight in source.decoder.state_dict().items():
        assert_exact(weight, again.decoder.state_dict()[name], name)
    with torch.no_grad():
        again.decoder.norm.weight[0] += 1e-6
    assert fingerprint(source.decoder) != fingerprint(again.decoder)
