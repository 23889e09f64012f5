"""Models of subquad in Hugging Face transformers, and subquad's attention in transformers' models.

Importing it registers the Auto classes, and adds the models to the tables of transformers and PEFT. LoRA is in
`subquad.hf.lora`, llama2.c checkpoints in `subquad.hf.llama2c`.
"""

from subquad.extras import needed

with needed("subquad.hf"):
    from transformers import AutoConfig
    from transformers.models import auto
    from transformers.models.auto import modeling_auto

from subquad.hf.backbone import SubquadModel
from subquad.hf.cache import SubquadCache
from subquad.hf.classify import SubquadForSequenceClassification, SubquadForTokenClassification
from subquad.hf.config import SubquadConfig
from subquad.hf.encoders import (
    SubquadClassifierConfig,
    SubquadEncoderForSequenceClassification,
    SubquadForPreTraining,  # noqa: F401 (registered below by its name)
    SubquadPretrainingConfig,
)
from subquad.hf.image import SubquadForImages, SubquadImageConfig
from subquad.hf.interface import register, set_attention
from subquad.hf.model import SubquadForCausalLM
from subquad.hf.transfer import from_transformers, to_transformers

for _config in (SubquadConfig, SubquadClassifierConfig, SubquadPretrainingConfig, SubquadImageConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto, _model in _config.auto_classes.items():
        getattr(auto, _auto).register(_config, globals()[_model], exist_ok=True)
# The Trainer shifts labels for the names in this table, and pipelines look their task's models up in these.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["subquad"] = "SubquadForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["subquad"] = "SubquadForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["subquad"] = "SubquadForTokenClassification"

__all__ = [
    "SubquadCache",
    "SubquadConfig",
    "SubquadEncoderForSequenceClassification",
    "SubquadForCausalLM",
    "SubquadForImages",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
    "from_transformers",
    "register",
    "set_attention",
    "to_transformers",
]
