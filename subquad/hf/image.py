"""The image model as a transformers model: `Trainer`, `from_pretrained`, the Auto class.

Shape letters: B batch, T pixels (bytes), P parameters of a pixel's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput
from transformers.utils import can_return_tuple

from subquad.hf.config import SubquadConfig, fields_of
from subquad.hf.loading import StrictModel
from subquad.models.image import ImageModel, ImageModelConfig


class SubquadImageConfig(fields_of(ImageModelConfig), SubquadConfig):  # type: ignore[misc]
    """The fields of `ImageModelConfig`, with those that transformers adds to every model."""

    model_type = "subquad-image"
    auto_classes: ClassVar[dict[str, str]] = {"AutoModel": "SubquadForImages"}
    own_fields: ClassVar[tuple[str, ...]] = tuple(field.name for field in fields(ImageModelConfig))

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.image_config()

    def image_config(self) -> ImageModelConfig:
        """Return the `ImageModelConfig`; raises `ValueError` or `TypeError` as it does."""
        return ImageModelConfig.from_dict({name: getattr(self, name) for name in self.own_fields})

    @classmethod
    def from_image(cls, config: ImageModelConfig, **kwargs: Any) -> Self:
        """Return the configuration of the same model; `kwargs` are transformers' own fields."""
        return cls(**config.to_dict(), **kwargs)


@dataclass
class ImageModelOutput(ModelOutput):
    """Output of `SubquadForImages`."""

    loss: Tensor | None = None
    """Nats per pixel."""
    parameters: Tensor | None = None
    """Parameters of each pixel's distribution, `[B, T, P]`."""


class SubquadForImages(StrictModel):
    """An image model around `subquad.models.ImageModel`, its attribute `model`."""

    config: SubquadImageConfig
    config_class = SubquadImageConfig

    def __init__(self, config: SubquadImageConfig) -> None:
        super().__init__(config)
        self.model = ImageModel(config.image_config())
        if self.model.tied:
            self._tied_weights_keys = {"model.head.weight": "model.embedding.tokens.weight"}
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None) -> ImageModelOutput:
        """Return the loss in nats per pixel (with `labels`) or the parameters `[B, T, P]` of each pixel's distribution.

        `input_ids` `[B, T]` are the bytes of images, row by row, the channels of a pixel one after another; T may be
        less than a whole image. `labels` are the same bytes, with -100 for pixels that do not count. Raises
        `ValueError` or `TypeError` for bytes that do not fit the configuration's images.
        """
        if input_ids is None:
            raise ValueError("input_ids is needed: the bytes of images, a tensor [B, T]")
        loss, parameters_BTP = None, None
        if labels is not None:
            loss = self.model.loss(input_ids, labels)
        else:
            parameters_BTP = self.model(self.model.inputs(input_ids))[0]
        return ImageModelOutput(loss=loss, parameters=parameters_BTP)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding.tokens
