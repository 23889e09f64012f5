"""Context parallelism: one sequence over several processes, and the exchanges between them.

Every process runs the same operations in the same order, so the exchanges also match in the backward pass, which
autograd runs in reverse. Only the inside of an exchange depends on the rank.
"""

from subquad.parallel.group import ContextGroup, Sent, active_group, context_parallel

__all__ = ["ContextGroup", "Sent", "active_group", "context_parallel"]
