"""Small model folders for the commands to read."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.data import load_tokenizer
from subquad.hf import SubquadConfig, SubquadForCausalLM

VOCABULARY = 23
SHAPE = {"dim": 16, "num_layers": 1, "num_heads": 2, "init_std": 0.5, "attention": "llp"}


def word_tokenizer(vocabulary=None, specials=()):
    """A tokenizer of whole words: w0, w1, ..."""
    vocabulary = vocabulary or {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def save_model(folder, *, tokenizer=None, seed=0, **config):
    """Save an untrained model of words, or of bytes for tokenizer="bytes"; return its folder."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("bytes") if tokenizer == "bytes" else tokenizer or word_tokenizer()
    config = {"vocab_size": tokenizer.get_vocab_size(), **SHAPE, **config}
    SubquadForCausalLM(SubquadConfig(**config)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
