"""The families of transformers that our decoder can be: one file each, read in both directions."""

from __future__ import annotations

from subquad.hf.families.base import Family
from subquad.hf.families.gpt2 import GPT2
from subquad.hf.families.gpt_neox import GPT_NEOX
from subquad.hf.families.llama import LLAMA, QWEN2, QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3, GPT2, GPT_NEOX)}
"""By transformers' `model_type`; the first that fits is taken where none is asked for."""

__all__ = ["FAMILIES", "Family"]
