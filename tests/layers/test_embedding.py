import torch

from subquad.layers.embedding import Embedding
from subquad.layers.positions import Learned
from subquad.testing import assert_exact


def test_embedding_adds_the_positions_and_drops_out():
    embedding = Embedding(7, 4, position=Learned(4, 5), dropout=0.5)
    tokens = torch.tensor([[3, 1, 6]])
    dropped = embedding(tokens, 2)
    embedding.eval()
    plain = embedding(tokens, 2)
    assert_exact(plain, embedding.tokens.weight[tokens] + embedding.position.table.weight[2:5])
    assert_exact(dropped[dropped != 0], 2 * plain[dropped != 0])


def test_embedding_without_positions_is_the_table():
    embedding = Embedding(7, 4)
    tokens = torch.tensor([[3, 1], [0, 6]])
    assert_exact(embedding(tokens, 100), embedding.tokens.weight[tokens])
