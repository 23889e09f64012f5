"""A tiny model with full attention in a folder, with a tokenizer of words and a text."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.hf import SubquadConfig, SubquadForCausalLM

WORDS = [f"w{i}" for i in range(20)]
SHAPE = {"vocab_size": 24, "dim": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "attention": "full"}


def save(folder, **changes):
    """Save a model whose start of a text is not the tokenizer's separator."""
    torch.manual_seed(0)
    SubquadForCausalLM(SubquadConfig(**SHAPE, **changes, init_std=0.2, bos_token_id=1)).save_pretrained(folder)
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
