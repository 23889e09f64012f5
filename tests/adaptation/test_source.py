"""The model, the tokenizer and the text that a conversion starts from."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from subquad.adaptation.source import Tokens, load_source, read_text
from subquad.data import DataConfig, load_tokenizer, write_tokens
from subquad.hf import lora
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


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_model_of_transformers_is_imported_with_its_special_tokens(original, tmp_path, family):
    model = theirs(family).eval()
    model.save_pretrained(tmp_path)
    shutil.copyfile(original / "tokenizer.json", tmp_path / "tokenizer.json")
    source = load_source(tmp_path)
    assert {name: getattr(source.model.config, name) for name in SIZES} == SIZES
    tokens = torch.arange(9)[None]
    assert_exact(source.decoder(tokens)[0].argmax(-1), model(tokens).logits.argmax(-1))


def test_folders_without_a_whole_model_of_one_tokenizer_are_refused(original, tmp_path):
    for name in ("config.json", "tokenizer.json", "damaged", "other"):
        shutil.copytree(original, tmp_path / name)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name / name).unlink()
    tensors = load_file(tmp_path / "damaged" / "model.safetensors")
    tensors["model.decoder.layers.1.attention.query.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer("bytes").save(str(tmp_path / "other" / "tokenizer.json"))
    adapted = lora.add_adapter(lora.load_base(original), rank=1, base=lora.Base.of(original))
    lora.save_adapter(adapted, tmp_path / "adapter")
    for name, message in (
        ("nowhere", r"there is no folder .*nowhere; give the folder of a model"),
        ("config.json", "holds no config.json; a conversion needs a model and its tokenizer"),
        ("tokenizer.json", "holds no tokenizer.json; a conversion needs a model and its tokenizer"),
        ("adapter", "adapter holds an adapter, not a whole model: merge it with: "),
        ("damaged", r"damaged: model\.decoder\.layers\.1\.attention\.query\.weight is not finite"),
        ("other", r"256 tokens, the model knows \d+; does the tokenizer in \S*other belong to another model\?"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            load_source(tmp_path / name)


def test_a_text_is_refused_if_a_part_is_short_or_it_is_a_folder_of_shards(original, texts, tmp_path):
    tokenizer, text = load_tokenizer(original), tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 30)
    data = DataConfig(path=str(text), cache=str(tmp_path / "cache"), held_out=0.5)
    with pytest.raises(ValueError, match=r"the train part of .* has \d+ tokens, .*; give more text or a smaller batch"):
        read_text(data, str(original), tokenizer, 1, 500)
    with pytest.raises(ValueError, match=r"the held-out part of .* give more text, a larger data\.held_out or a small"):
        read_text(data.replace(held_out=0.05), str(original), tokenizer, 1, 40)
    write_tokens(tmp_path / "shards", [str(texts)], tokenizer, shard_tokens=400)
    with pytest.raises(ValueError, match="is a folder of token shards; a conversion reads text"):
        read_text(data.replace(path=str(tmp_path / "shards"), held_out=0.05), str(original), tokenizer, 1, 8)


@pytest.mark.parametrize("start", [None, 9])
def test_tokens_read_on_demand_are_those_of_the_whole_text(start):
    stored = np.array([3, 0, 5, 6, 0, 7], dtype=np.uint16)
    whole = stored.astype(np.int64)
    if start is not None:
        whole = np.concatenate([[start], np.where(whole == 0, start, whole)])
    tokens = Tokens(stored, start, 0)
    assert len(tokens) == len(whole)
    for begin in range(len(whole)):
        for stop in range(begin, len(whole) + 1):
            assert tokens.part(begin, stop).tolist() == whole[begin:stop].tolist()
