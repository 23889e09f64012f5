"""Small models and adapters that change what they give."""

import torch

from subquad.hf import SubquadConfig, SubquadForCausalLM, SubquadForSequenceClassification
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.models import EncoderConfig

SMALL = {
    "elita": {"horizon": 64},
    "linformer": {"max_tokens": 64, "projected": 8},
    "luna": {"memory_tokens": 8},
    "llp": {"segment": 16},
    "llp_printed": {"segment": 16},
    "perceiver": {"latents": 8},
    "perceiver_ar": {"latents": 8, "history": "compressed", "history_tokens": 16, "projected": 4, "decode": "exact"},
    "perceiver_io": {"latents": 8},
    "window": {"width": 16},
}
VOCABULARY, T = 32, 24


def language_model(name="llp", seed=0, **changes):
    torch.manual_seed(seed)
    config = SubquadConfig(
        vocab_size=VOCABULARY, dim=16, num_layers=2, num_heads=2, attention=name, options={name: SMALL.get(name, {})},
        position="none", init_std=0.3, **changes,
    )  # fmt: skip
    return SubquadForCausalLM(config).double().eval()


def classifier(name="llp", classes=3):
    torch.manual_seed(0)
    options = {name: SMALL.get(name, {})}
    config = EncoderConfig(
        vocab_size=VOCABULARY, dim=16, num_layers=1, num_heads=2, attention=name, options=options, position="none",
        num_classes=classes, init_std=0.3,
    )  # fmt: skip
    return SubquadForSequenceClassification(SubquadClassifierConfig.from_encoder(config)).double().eval()


def filled(adapted, seed=1):
    """Factors that change the outputs, as training leaves them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted.double().eval()


def tokens(rows=2):
    return torch.randint(0, VOCABULARY, (rows, T), generator=torch.Generator().manual_seed(2))


def logits(model, **options):
    with torch.no_grad():
        return model(tokens(), **options).logits
