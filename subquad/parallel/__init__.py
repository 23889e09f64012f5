"""One sequence over several processes: the tokens that each holds, and the exchanges between them.

Every process runs the same operations in the same order, so that the exchanges of the backward pass, which autograd
runs in the reverse order, meet as well. Only what an exchange does inside depends on the rank.
"""

from subquad.parallel.group import ContextGroup, Sent, active_group, context_parallel

__all__ = ["ContextGroup", "Sent", "active_group", "context_parallel"]
