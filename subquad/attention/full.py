"""Full causal softmax attention (Vaswani et al. 2017, arXiv:1706.03762): the quadratic baseline.

y_t = sum_{s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s
"""

from subquad.attention._blocked import BlockedAttention
from subquad.ops.patterns import Causal


class Full(BlockedAttention):
    """Every earlier token and itself; the state keeps every key and value."""

    name = "full"
    summary = "every earlier token"
    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    cost_order = "quadratic"
    state_grows = True
    pattern = Causal()
