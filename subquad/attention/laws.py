"""The laws that every mechanism keeps; `subquad.testing.AttentionContract` tests them."""

from __future__ import annotations

from enum import StrEnum


class Law(StrEnum):
    """A law of the contract: its name in words, and what it asks for."""

    WEIGHTS = "weights", "weights are causal, and the rows of a distribution sum to one"
    DEFINITION = "definition", "outputs and every gradient are those of weights times values"
    SPLIT = "split", "any split of the sequence gives the same result"
    TOKEN_BY_TOKEN = "token by token", "one token at a time gives the same result"
    STATE_SIZE = "state size", "the state stops growing, or the class says that it grows"
    COST = "cost", "operations and memory grow as the class says"
    BLOCK_SIZES = "block sizes", "block sizes change nothing, and any number of tokens works"
    PADDING = "padding", "padding anywhere is neither seen nor counted"
    NO_FUTURE = "no future", "no bit of an output depends on a later token"
    BATCH = "batch", "a batch gives what its rows give alone"
    PRECISION = "precision", "each backend and dtype stays in the error budget, under autocast too"
    COMPILED = "compiled", "torch.compile takes it whole and changes nothing"
    SAVED = "saved", "weights and state survive saving"
    LONG = "long", "long inputs in half precision are finite, with their gradients"
    DOCUMENTS = "documents", "documents packed into a row are as if each were alone"
    ROLLBACK = "rollback", "a kept state is what it was, so that tokens read after it can be taken back"
    IN_PLACE = "in place", "decoding in a static cache that is written in place is decoding with the usual state"
    RANKS = "ranks", "processes that share a sequence compute what one does, and send what the class says"

    asks: str
    """What the law asks for, in one line."""

    def __new__(cls, words: str, asks: str) -> Law:
        law = str.__new__(cls, words)
        law._value_, law.asks = words, asks
        return law


OF_STATES = (Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.ROLLBACK, Law.IN_PLACE, Law.RANKS)
"""Laws of states, which do not apply to forms that read whole sequences."""
