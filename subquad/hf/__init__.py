"""Hugging Face: `SubquadConfig`, `SubquadForCausalLM`, `SubquadCache`, `SubquadForSequenceClassification`,
`SubquadForPreTraining`, `SubquadForImages`, `from_transformers`, `to_transformers`, `read_llama2c`.

Importing registers the Auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)

from subquad.hf.cache import SubquadCache
from subquad.hf.classification import SubquadClassifierConfig, SubquadForSequenceClassification
from subquad.hf.config import SubquadConfig
from subquad.hf.image import ImageModelOutput, SubquadForImages, SubquadImageConfig
from subquad.hf.llama2c import read_llama2c
from subquad.hf.model import SubquadForCausalLM
from subquad.hf.pretraining import SubquadForPreTraining, SubquadPretrainingConfig
from subquad.hf.transfer import from_transformers, to_transformers

AutoConfig.register(SubquadConfig.model_type, SubquadConfig, exist_ok=True)
AutoModelForCausalLM.register(SubquadConfig, SubquadForCausalLM, exist_ok=True)
AutoConfig.register(SubquadClassifierConfig.model_type, SubquadClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(SubquadClassifierConfig, SubquadForSequenceClassification, exist_ok=True)
AutoConfig.register(SubquadPretrainingConfig.model_type, SubquadPretrainingConfig, exist_ok=True)
AutoModelForPreTraining.register(SubquadPretrainingConfig, SubquadForPreTraining, exist_ok=True)
AutoConfig.register(SubquadImageConfig.model_type, SubquadImageConfig, exist_ok=True)
AutoModel.register(SubquadImageConfig, SubquadForImages, exist_ok=True)

__all__ = [
    "ImageModelOutput",
    "SubquadCache",
    "SubquadClassifierConfig",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForImages",
    "SubquadForPreTraining",
    "SubquadForSequenceClassification",
    "SubquadImageConfig",
    "SubquadPretrainingConfig",
    "from_transformers",
    "read_llama2c",
    "to_transformers",
]
