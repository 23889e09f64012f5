"""PyTorch's optimizers over parameter groups in which only matrices have weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Muon, Optimizer, RAdam

from subquad.layers.head import Lookup
from subquad.training.config import OptimizerConfig


class MuonAdamW(Optimizer):
    """Muon for some matrices and AdamW for all other parameters, behind a single optimizer's interface.

    Both parts share this optimizer's `state` and `param_groups`, so schedulers and `state_dict` need no special case.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both parts and return the loss of `closure`, if given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict` into both parts."""
        super().load_state_dict(state_dict)
        self._share()


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer of `config` for the trainable parameters of `model`.

    Only matrices decay, not embeddings, norms, biases and other vectors. Muon takes the matrices of the layers, but not
    the embeddings, the head and the look-up after it. Raises `ValueError` if Muon would have no matrix.
    """
    matrices, rest = split_parameters(model)
    betas = (config.betas[0], config.betas[1])
    adam_options: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps}
    groups = _groups(matrices, rest, config)
    if config.name == "adamw":
        return AdamW(groups, fused=True, **adam_options)
    if config.name == "adam":
        return Adam(groups, fused=True, **adam_options)
    if config.name == "radam":
        return RAdam(groups, **adam_options)
    every: list[Any] = list(model.modules())
    found = [module.get_output_embeddings() for module in every if hasattr(module, "get_output_embeddings")]
    found += [module for module in every if isinstance(module, Lookup)]
    heads = {id(parameter) for module in found if module is not None for parameter in module.parameters()}
    hidden = [weight for weight in matrices if weight.ndim == 2 and id(weight) not in heads]
    taken = {id(weight) for weight in hidden}
    others = [weight for weight in matrices if id(weight) not in taken]
    if not hidden:
        raise ValueError("optimizer.name=muon needs a model with 2-D weights in its layers, and this one has none")
    muon = Muon(
        hidden,
        lr=config.lr if config.matrix_lr is None else config.matrix_lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAdamW(muon, AdamW(_groups(others, rest, config), fused=True, **adam_options))


def _groups(decaying: list[Tensor], rest: list[Tensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    groups = [{"params": decaying, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trainable matrices, and the other trainable parameters (embeddings, norms, biases, vectors)."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            vector = parameter.ndim < 2 or id(parameter) in embeddings
            (rest if vector else matrices).append(parameter)
    return matrices, rest
