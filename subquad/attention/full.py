"""Full softmax attention (Vaswani et al. 2017, arXiv:1706.03762): the quadratic baseline.

y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    over s <= t where it is causal
"""

from subquad.attention.base import takes_options
from subquad.attention.blocked import BlockedAttention
from subquad.ops.patterns import Causal
from subquad.ops.patterns import Full as FullPattern


class Full(BlockedAttention):
    """Every token (causal: every earlier one and itself); the state keeps every key and value."""

    name = "full"
    rings = True
    summary = "every token"
    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    forms = ("causal", "bidirectional")
    cost_order = "quadratic"
    state_grows = True

    @takes_options(BlockedAttention.Config)
    def __init__(self, config: BlockedAttention.Config) -> None:
        super().__init__(config)
        self.patterns = (Causal() if config.causal else FullPattern(),)
