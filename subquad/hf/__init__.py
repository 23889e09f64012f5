"""Models of subquad in Hugging Face transformers, and subquad's attention in transformers' models.

Importing it registers the Auto classes. Configurations of the other models are `SubquadForImages.config_class` etc.;
LoRA is in `subquad.hf.lora`, llama2.c checkpoints in `subquad.hf.llama2c`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)

from subquad.hf.cache import SubquadCache
from subquad.hf.config import SubquadConfig
from subquad.hf.encoders import (
    SubquadClassifierConfig,
    SubquadForPreTraining,
    SubquadForSequenceClassification,
    SubquadPretrainingConfig,
)
from subquad.hf.image import SubquadForImages, SubquadImageConfig
from subquad.hf.interface import register, set_attention
from subquad.hf.model import SubquadForCausalLM
from subquad.hf.transfer import from_transformers, to_transformers

for _auto, _config, _model in (
    (AutoModelForCausalLM, SubquadConfig, SubquadForCausalLM),
    (AutoModelForSequenceClassification, SubquadClassifierConfig, SubquadForSequenceClassification),
    (AutoModelForPreTraining, SubquadPretrainingConfig, SubquadForPreTraining),
    (AutoModel, SubquadImageConfig, SubquadForImages),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    _auto.register(_config, _model, exist_ok=True)

__all__ = [
    "SubquadCache",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForImages",
    "SubquadForPreTraining",
    "SubquadForSequenceClassification",
    "from_transformers",
    "register",
    "set_attention",
    "to_transformers",
]
