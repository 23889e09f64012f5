"""What the transformers models around an encoder share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subquad.hf._inputs import padding_mask
from subquad.hf._strict import StrictModel
from subquad.hf.model import _refuse


class EncoderModel(StrictModel):
    """A model whose attribute `model` has an `encoder`; its configuration gives `encoder_config()`."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules = ["Block", "CrossBlock"]  # noqa: RUF012 (transformers declares it so)
    model: Any

    def get_input_embeddings(self) -> nn.Module:
        """The table of token vectors."""
        table: nn.Module = self.model.encoder.embedding.tokens
        return table

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token vectors."""
        self.model.encoder.embedding.tokens = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the vocabulary, as transformers does; the encoder's configuration follows."""
        table = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.model.encoder.config = self.config.encoder_config()
        return table

    def _init_weights(self, module: nn.Module) -> None:
        self.model.initialise(module)


def read_inputs(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
) -> tuple[Tensor, Tensor | None]:
    """The tokens `[B, T]` and which are real (None: all). Raises `ValueError` for what no encoder of ours takes."""
    _refuse(inputs_embeds, output_attentions, output_hidden_states)
    if input_ids is None:
        raise ValueError("input_ids is needed: a tensor [B, T] of token numbers")
    return input_ids, padding_mask(attention_mask, input_ids)
