"""Heads that share queries and keys: G groups of `share` neighbouring heads each."""

from torch import Tensor


def share_of(groups: int, heads: int) -> int:
    """Return the heads of a group; raise `ValueError` if the groups don't divide the heads."""
    if groups == heads:
        return 1
    if groups < 1 or heads % groups:
        raise ValueError(f"the heads of v must be a multiple of the groups of q, got {heads} heads and {groups} groups")
    return heads // groups


def by_heads(x_G: Tensor, share: int) -> Tensor:
    """Repeat each group `[G, ...]` for its heads, `[G * share, ...]`; the same tensor if a group is a head."""
    return x_G if share == 1 else x_G.repeat_interleave(share, 0)


def by_groups(x_H: Tensor, share: int) -> Tensor:
    """Sum the heads `[G * share, ...]` of each group, `[G, ...]`."""
    return x_H if share == 1 else x_H.unflatten(0, (-1, share)).sum(1)
