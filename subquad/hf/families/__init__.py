"""Families of transformers models that our decoder supports, one file each, converted in both directions."""

from __future__ import annotations

from subquad.hf.families.bamba import BAMBA
from subquad.hf.families.base import Family
from subquad.hf.families.gpt2 import GPT2
from subquad.hf.families.gpt_neox import GPT_NEOX
from subquad.hf.families.granite_hybrid import GRANITE_HYBRID
from subquad.hf.families.llama import LLAMAS
from subquad.hf.families.mamba2 import MAMBA2
from subquad.hf.families.qwen_hybrid import QWEN3_5, QWEN3_NEXT

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*LLAMAS, GPT2, GPT_NEOX, MAMBA2, GRANITE_HYBRID, BAMBA, QWEN3_5, QWEN3_NEXT)
}
"""Families by transformers' `model_type`; exports that name no family use the first that fits."""

__all__ = ["FAMILIES", "Family"]
