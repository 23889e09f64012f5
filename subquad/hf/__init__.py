"""Hugging Face: `SubquadConfig`, `SubquadForCausalLM`, `SubquadCache`, `SubquadForSequenceClassification`.

Importing registers the Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from subquad.hf.cache import SubquadCache
from subquad.hf.classification import SubquadClassifierConfig, SubquadForSequenceClassification
from subquad.hf.config import SubquadConfig
from subquad.hf.model import SubquadForCausalLM

AutoConfig.register(SubquadConfig.model_type, SubquadConfig, exist_ok=True)
AutoModelForCausalLM.register(SubquadConfig, SubquadForCausalLM, exist_ok=True)
AutoConfig.register(SubquadClassifierConfig.model_type, SubquadClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(SubquadClassifierConfig, SubquadForSequenceClassification, exist_ok=True)

__all__ = [
    "SubquadCache",
    "SubquadClassifierConfig",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForSequenceClassification",
]
