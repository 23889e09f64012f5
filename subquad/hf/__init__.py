"""Hugging Face: `SubquadConfig`, `SubquadForCausalLM`, `SubquadCache`; importing registers the Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from subquad.hf.cache import SubquadCache
from subquad.hf.config import SubquadConfig
from subquad.hf.model import SubquadForCausalLM

AutoConfig.register(SubquadConfig.model_type, SubquadConfig, exist_ok=True)
AutoModelForCausalLM.register(SubquadConfig, SubquadForCausalLM, exist_ok=True)

__all__ = ["SubquadCache", "SubquadConfig", "SubquadForCausalLM"]
