from subquad.testing import AttentionContract


class TestLatteMacchiato(AttentionContract):
    name = "latte_macchiato"
    with_inductor = False
    options = {"num_latents": 6, "width": 7}


class TestLatteMacchiatoOfSharedHeads(AttentionContract):
    """One head of keys and values in the window, whose values the latents mix too."""

    name = "latte_macchiato"
    with_inductor = False
    options = {"num_latents": 6, "width": 7, "num_kv_heads": 1, "rope": False}
