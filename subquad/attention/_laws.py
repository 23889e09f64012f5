"""The laws of the contract in a line each; `subquad.testing.AttentionContract` tests them."""

LAWS = {
    1: "weights are causal, and the rows of a distribution sum to one",
    2: "outputs and every gradient are those of weights times values",
    3: "any split of the sequence gives the same result",
    4: "one token at a time gives the same result",
    5: "the state stops growing, or the class says that it grows",
    6: "operations and memory grow as the class says",
    7: "block sizes change nothing, and any number of tokens works",
    8: "padding anywhere is neither seen nor counted",
    9: "no bit of an output depends on a later token",
    10: "a batch gives what its rows give alone",
    11: "each backend and dtype stays in the error budget, under autocast too",
    12: "torch.compile takes it whole and changes nothing",
    13: "weights and state survive saving",
    14: "long inputs in half precision are finite, with their gradients",
    15: "documents packed into a row are as if each were alone",
}
"""What each law asks for."""
