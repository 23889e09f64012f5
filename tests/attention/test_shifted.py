import torch

from subquad.attention import build
from subquad.attention.laws import Law
from tests.attention.oracles import SoftmaxContract, agrees


class TestShifted(SoftmaxContract):
    name = "shifted"
    options = {"group": 16, "rope": True, "num_kv_heads": 1}
    fewest_heads = 2

    def sees(self, t, s, head):
        group = self.options["group"]
        moved = group // 2 if self.is_moved(head) else 0
        return s <= t and (s + moved) // group == (t + moved) // group


class TestShiftedAsPublished(TestShifted):
    """Groups that wrap around leak, so most laws don't apply; the others hold as for the causal form."""

    name = "shifted"
    options = {"group": 16, "wrap": True}
    laws = (Law.WEIGHTS, Law.DEFINITION)
    tokens = 64
    fewest_heads = 2
    oracle_tokens = 32

    def sees(self, t, s, head):
        """By the places of tokens after a roll by half a group."""
        group, count = self.options["group"], self.oracle_tokens
        moved = group // 2 if self.is_moved(head) else 0
        t, s = (t - moved) % count, (s - moved) % count
        return s <= t and s // group == t // group


@torch.no_grad()
def test_the_published_roll_leaks():
    torch.manual_seed(0)
    layer = build("shifted", dim=12, num_heads=3, group=8, wrap=True).double()
    x = torch.randn(1, 16, 12, dtype=torch.float64)
    changed = x.clone()
    changed[0, 15] += 1
    moved = (layer(changed)[0] - layer(x)[0])[0].abs().sum(-1)
    assert (moved[:4] > 0).all(), "the first half group reads the last token"
    assert (moved[4:15] == 0).all()


def test_of_three_heads_the_last_is_moved():
    agrees(TestShifted, num_heads=3, bias=True)
