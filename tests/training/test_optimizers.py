"""Optimizers: which parameters decay, and which each of them takes. That states come back: test_run.py."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from subquad.layers.head import Lookup
from subquad.models import Classifier, EncoderConfig
from subquad.testing import assert_exact
from subquad.training import OptimizerConfig
from subquad.training.optimizers import MuonAdamW, build_optimizer, split_parameters

NAMES = ["adamw", "adam", "radam", "muon"]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.norm(self.two(self.one(self.embedding(tokens)).relu())))


def step(model, *optimizers, number):
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(number))
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def test_only_trained_matrices_decay_and_a_tied_head_is_an_embedding():
    model = Toy()
    model.one.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, rest = ({names[id(p)] for p in group} for group in split_parameters(model))
    assert matrices == {"two.weight", "head.weight"}
    assert rest == {"embedding.weight", "one.bias", "two.bias", "norm.weight", "norm.bias"}
    model.head.weight = model.embedding.weight
    matrices, rest = split_parameters(model)
    assert [names[id(p)] for p in matrices] == ["two.weight"]
    assert sum(parameter is model.head.weight for parameter in rest) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_trained_once_and_only_matrices_shrink_without_a_gradient(name):
    model = Toy()
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))
    taken = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in model.parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {"one.weight", "two.weight", "head.weight"}


def test_muon_takes_the_layers_matrices_and_neither_heads_nor_a_look_up_over_the_logits():
    model = Toy()
    model.lookup = Lookup(11, 32)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=1e-3, matrix_lr=2e-3, momentum=0.9))
    assert isinstance(optimizer, MuonAdamW)
    muon, *others = optimizer.param_groups
    assert {id(p) for p in muon["params"]} == {id(model.one.weight), id(model.two.weight)}
    assert (muon["lr"], muon["momentum"]) == (2e-3, 0.9)
    assert all(group["lr"] == 1e-3 for group in others)
    assert optimizer.step(lambda: model(torch.zeros(1, 2, dtype=torch.long)).sum()).requires_grad

    classifier = Classifier(EncoderConfig(vocab_size=5, dim=16, num_layers=1, num_heads=2, attention="full"))
    taken = {id(p) for p in build_optimizer(classifier, OptimizerConfig(name="muon")).param_groups[0]["params"]}
    assert taken == {id(m.weight) for m in classifier.encoder.layers.modules() if isinstance(m, nn.Linear)}
    with pytest.raises(ValueError, match="muon needs a model with 2-D weights"):
        build_optimizer(nn.LayerNorm(4), OptimizerConfig(name="muon"))


def test_muon_equals_its_two_parts():
    model, apart = Toy(), Toy()
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1))
    hidden = [apart.one.weight, apart.two.weight]
    rest = [apart.embedding.weight, apart.one.bias, apart.two.bias, *apart.norm.parameters()]
    parts = [
        Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW([apart.head.weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for number in range(3):
        step(model, optimizer, number=number)
        step(apart, *parts, number=number)
    for parameter, twin in zip(model.parameters(), apart.parameters(), strict=True):
        assert_exact(parameter, twin)
