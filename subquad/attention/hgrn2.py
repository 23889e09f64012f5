"""HGRN2: a gated recurrence whose keys are one minus its decays (Qin et al. 2024, arXiv:2404.07904, section 3).

    S_t = diag(f_t) S_{t-1} + (1 - f_t) (x) i_t,    o_t = g_t S_t,    y_t = W_o rmsnorm(o_t)
    f_t = b + (1 - b) sigmoid(W_f x_t),    i_t = silu(W_i x_t),    g_t = sigmoid(W_g x_t)

The state is a mean of the inputs i, channel by channel, and the output gate g is its query. The paper's equations are
followed; the authors' language models take the silu of W_g x and leave i linear, and norm all heads together.

b, the least that a channel keeps, grows with the layers: higher ones remember longer. In the paper the b of all layers
are the running sums of one softmax over layers, and the first layer's is 0. Here each layer learns its own b, the
sigmoid of a parameter, which begins at the initial value of those sums: l / L in layer l = 1, 2, ... of L. Layer 0, and
a layer outside a model, have b = 0.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import RecurrentConfig, add_projections, heads_of, rms_normed
from subquad.ops.precision import wide_dtype
from subquad.tracing import has_values

logger = logging.getLogger(__name__)


@functools.cache
def _warn_not_placed() -> None:
    logger.warning(
        "an hgrn2 layer trains with the least decay b = 0 of a first or single layer, since set_layer_index was not "
        "called: in a model of several layers call layer.set_layer_index(number, layers) of each (from 0), before the "
        "optimizer is made"
    )


class Hgrn2(Attention):
    """A running mean of each channel, with data-dependent decays."""

    name = "hgrn2"
    summary = "every earlier token, in gated running means"
    paper = "Qin et al. 2024, arXiv:2404.07904"
    sees_order = True
    is_distribution = False
    bound: nn.Parameter | None

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        """Options of HGRN2."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_projections(self, config)
        self.norm_weight = nn.Parameter(torch.ones(config.values))
        self.register_parameter("bound", None)
        self.placed = False

    def set_layer_index(self, layer: int, layers: int) -> None:
        """Let b begin at `layer / layers`; it stays 0 in layer 0."""
        self.placed = True
        if layer:
            logit = math.log(layer / (layers - layer))
            self.bound = nn.Parameter(self.key.weight.new_full((self.config.keys * self.config.num_heads,), logit))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the gated scan, whose keys are 1 less its decays."""
        # Costs are counted in a run without data, which must not warn.
        if not self.placed and self.training and torch.is_grad_enabled() and has_values(x_BTD):
            _warn_not_placed()
        q_BHTK, z_BHTK, v_BHTV = heads_of(self, x_BTD)
        wide = wide_dtype(z_BHTK)
        k_BHTK = (-z_BHTK.to(wide)).sigmoid()
        if self.bound is None:
            log_f_BHTK = F.logsigmoid(z_BHTK.to(wide))
        else:
            k_BHTK = (-self.bound.to(wide)).sigmoid().view(-1, 1, self.config.keys) * k_BHTK
            # As log(1 - k): near 1, where the bounds of higher layers are, the difference of f from 1 would be rounded
            # away. If k rounds to 1, the logarithm stays finite.
            log_f_BHTK = torch.log1p(-k_BHTK.clamp(max=1 - torch.finfo(wide).eps))
        (sums,) = past.keep(sums=Recurrence(k_BHTK, past.values(F.silu(v_BHTV)), log_f_BHTK))
        return sums.read(q_BHTK.sigmoid())

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o rmsnorm(y)`."""
        y_BTC = join(rms_normed(y_BHTV, self.norm_weight, self.config.norm_eps).to(x_BTD.dtype))
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))
