"""Judge the claims of the Latte paper's Table 2 that are no plain comparison of two mechanisms."""

from experiments.harness.noise import Difference, Row, compare, gain, pooled, select

AS_GOOD = 0.02
"""Loss of accuracy that still counts as good: the paper's two rows differ by up to 1.9 points."""


def few_latents(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that few latents lose less than `AS_GOOD`, beyond the noise; `rows` are those of one task."""
    few, many = ({"mechanism": f"Latte, {latents}"} for latents in ("few latents", "L = D"))
    found = compare(rows, few, many, "accuracy")
    return None if found is None else ([found.toward(1, AS_GOOD)], str(found))


def beyond_a_bag(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare the mean accuracy of each mechanism with the bag of tokens on the same test sequences of one task."""
    noise = pooled(rows, "accuracy")
    gains = {
        name: gain(select(rows, {"mechanism": name}), "accuracy", "bag_of_tokens", 1.0, noise)
        for name in dict.fromkeys(row["mechanism"] for row in rows)
    }
    if not gains:
        return None
    worst = min(gains, key=lambda name: gains[name].value)
    return list(gains.values()), f"at least {100 * gains[worst].value:+.1f} points ({worst})"


claim_latents_listops = claim_latents_image = few_latents
claim_beyond_a_bag_listops = claim_beyond_a_bag_image = beyond_a_bag
