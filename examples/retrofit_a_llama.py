"""Give a transformers model sub-quadratic attention by one argument, without changing a weight.

Run it: python examples/retrofit_a_llama.py [CHECKPOINT]    (default: a tiny Llama with random weights, made here)
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from subquad import hf


def tiny_llama(folder: str) -> str:
    """Write a Llama with random weights to `folder`, so that the example needs no download."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).save_pretrained(folder)
    return folder


def main(checkpoint: str | None = None) -> None:
    """Load the checkpoint with LLP attention, generate, and save it; the choice is stored in its config.json."""
    hf.register()  # adds subquad_llp, subquad_window, subquad_shifted, ... to transformers' attention functions
    with tempfile.TemporaryDirectory() as folder:
        source = checkpoint or tiny_llama(f"{folder}/llama")
        model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="subquad_llp")
        hf.set_attention(model, "llp", segment=32)  # the same choice with an option
        prompt = torch.arange(1, 101)[None]
        tokens = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        print("generated:", tokens[0, 100:].tolist())

        model.save_pretrained(f"{folder}/longer")
        again = AutoModelForCausalLM.from_pretrained(f"{folder}/longer")
        print("stored in config.json:", again.config.subquad)
        assert torch.equal(again(tokens).logits, model(tokens).logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
