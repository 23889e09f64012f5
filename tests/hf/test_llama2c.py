"""llama2.c's checkpoints: read exactly, and refused where the numbers do not fit the file."""

import struct

import numpy as np
import pytest
import torch

from subquad.data.llama2c import read_llama2c_tokenizer
from subquad.hf import SubquadForCausalLM, to_transformers
from subquad.hf.llama2c import is_llama2c, read_llama2c
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from tests.fuzz.targets import write_llama2c

GREEDY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "


class Forward:
    """The equations of Llama 2 in numpy and float64, from the file itself, one token after another."""

    def __init__(self, file):
        raw = file.read_bytes()
        d, f, n, h, g, v, self.positions = struct.unpack_from("<7i", raw)
        self.d, self.layers, self.heads, self.groups, self.k = d, n, h, g, d // h
        numbers, self.at = np.frombuffer(raw, "<f4", offset=28).astype(np.float64), 0

        def take(*shape):
            count = int(np.prod(shape))
            self.at += count
            return numbers[self.at - count : self.at].reshape(shape)

        self.table, kv = take(abs(v), d), self.k * g
        self.att_norm, self.wq, self.wk, self.wv = take(n, d), take(n, d, d), take(n, kv, d), take(n, kv, d)
        self.wo, self.ff_norm = take(n, d, d), take(n, d)
        self.w1, self.w2, self.w3, self.norm = take(n, f, d), take(n, d, f), take(n, f, d), take(d)
        take(2, self.positions, self.k // 2)
        self.head = self.table if v > 0 else take(abs(v), d)
        assert self.at == len(numbers)
        self.keys, self.values, self.seen = [[] for _ in range(n)], [[] for _ in range(n)], 0

    @staticmethod
    def rms(x, weight):
        return x / np.sqrt((x * x).mean() + 1e-5) * weight

    def turned(self, x):
        pairs = x.reshape(-1, self.k // 2, 2)
        angles = self.seen * 10000.0 ** (-2 * np.arange(self.k // 2) / self.k)
        a, b, cos, sin = pairs[..., 0], pairs[..., 1], np.cos(angles), np.sin(angles)
        return np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(-1, self.k)

    def __call__(self, token):
        x = self.table[token].copy()
        for i in range(self.layers):
            z = self.rms(x, self.att_norm[i])
            q = self.turned(self.wq[i] @ z)
            self.keys[i].append(self.turned(self.wk[i] @ z))
            self.values[i].append((self.wv[i] @ z).reshape(-1, self.k))
            parts = []
            for head in range(self.heads):
                group = head * self.groups // self.heads
                scores = np.array([key[group] @ q[head] for key in self.keys[i]]) / np.sqrt(self.k)
                shares = np.exp(scores - scores.max())
                parts.append((shares / shares.sum()) @ np.array([value[group] for value in self.values[i]]))
            x = x + self.wo[i] @ np.concatenate(parts)
            z = self.rms(x, self.ff_norm[i])
            gate = self.w1[i] @ z
            x = x + self.w2[i] @ (gate / (1 + np.exp(-gate)) * (self.w3[i] @ z))
        self.seen += 1
        return self.head @ self.rms(x, self.norm)


@pytest.mark.parametrize("vocab", [20, -20])
def test_the_logits_are_those_of_the_equations(vocab, tmp_path):
    write_llama2c(tmp_path / "a.bin", vocab)
    model, forward, tokens = read_llama2c(tmp_path / "a.bin").double(), Forward(tmp_path / "a.bin"), [1, 7, 3, 3, 12]
    assert model.config.tie_embeddings == (vocab > 0)
    expected = torch.tensor(np.stack([forward(token) for token in tokens]))
    with torch.no_grad():
        assert_same_maths(model(torch.tensor([tokens])).logits[0], expected)


def number(place, value):
    return lambda raw: raw[: 4 * place] + struct.pack("<i", value) + raw[4 * place + 4 :]


@pytest.mark.parametrize(("change", "message"), [
    (number(0, 0), "dim must be at least 1, got 0"),
    (number(2, -1), "layers must be at least 1, got -1"),
    (number(5, 0), "vocab must not be 0"),
    (number(3, 3), "heads must divide dim into even parts"),
    (number(4, 3), "kv_heads divide heads"),
    (number(2, 2**31 - 1), "asks for 4,260,607,556,444"),
    (number(0, 0x616B3432), "version 12; only version 0"),
    (lambda raw: raw[:-1], "has 2,779 bytes; its header"),
    (lambda raw: raw + b"\0", "has 2,781 bytes; its header"),
    (lambda raw: raw[:28], "has 28 bytes; its header"),
    (lambda raw: raw[:27], "has 27 bytes, less than the 28"),
])  # fmt: skip
def test_numbers_and_lengths_that_make_no_model_are_refused(change, message, tmp_path):
    file, none = tmp_path / "a.bin", tmp_path / "b.bin"
    write_llama2c(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        read_llama2c(file)
    assert str(file) in str(caught.value)
    assert is_llama2c(file)
    assert not is_llama2c(none)
    with pytest.raises(FileNotFoundError, match="no file"):
        read_llama2c(none)


@pytest.fixture(scope="module")
def stories(data_folder):
    return data_folder / "stories260K"


@pytest.fixture(scope="module")
def model(stories):
    return read_llama2c(stories / "stories260K.bin")


def test_stories_are_told_word_for_word_with_the_logits_of_the_equations_and_of_transformers(stories, model):
    found = model.generate(torch.tensor([[1]]), max_new_tokens=60, do_sample=False)
    assert read_llama2c_tokenizer(stories / "tok512.bin").decode(found[0].tolist()).startswith(GREEDY)
    forward = Forward(stories / "stories260K.bin")
    expected = torch.tensor(np.stack([forward(token) for token in found[0].tolist()]))
    assert_exact(expected.argmax(-1)[:-1], found[0, 1:])
    exact, theirs = SubquadForCausalLM(model.config), to_transformers(model)
    exact.load_state_dict(model.state_dict())
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert_same_maths(exact.double().eval()(found).logits[0], expected)
        assert_in_budget(model(found).logits[0], theirs.eval()(found).logits[0], expected, torch.float32)


@pytest.mark.slow
@torch.no_grad()
def test_stories_of_its_own_have_the_documented_loss(model):
    """llama2.c documents 1.2968 nats a token on held-out stories, which the model's own stories have too."""
    torch.manual_seed(0)
    rows = torch.ones(48, 1, dtype=torch.int64)
    drawn = model.generate(
        rows, attention_mask=rows, max_new_tokens=255, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0
    )
    logits = model(drawn).logits[:, :-1].mT
    loss_B = torch.nn.functional.cross_entropy(logits, drawn[:, 1:], reduction="none").mean(1)
    assert abs(loss_B.mean() - 1.2968) < 4 * loss_B.std() / len(rows) ** 0.5  # standard errors over whole stories
