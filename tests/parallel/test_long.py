"""A million tokens on two processes (`SUBQUAD_LONG=65536`: fewer). Run with `-s` to see seconds and memory."""

import json
import os
import resource
import time

import pytest
import torch

from subquad.models import Decoder, DecoderConfig
from subquad.parallel import context_parallel
from subquad.testing import assert_exact
from tests.parallel.processes import run_processes

TOKENS = int(os.environ.get("SUBQUAD_LONG", 1 << 20))
DIM = 32
OPTIONS = {"llp": {"segment": 256}, "elita": {"horizon": 1 << 20}}


def a_prompt_and_a_step(group, name):
    """Read a prompt of `TOKENS` tokens with a small byte model over all ranks, then take one training step on it."""
    torch.manual_seed(0)
    position = "rope" if name == "llp" else "none"
    shape = {"vocab_size": 256, "dim": DIM, "num_layers": 2, "num_heads": 2, "position": position}
    decoder = Decoder(DecoderConfig(**shape, attention=name, options=OPTIONS))
    decoder.gradient_checkpointing = True
    ids = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    part, labels = group.part(ids[:, :-1]), group.part(ids[:, 1:])
    report = {"mechanism": name, "rank": group.rank, "tokens": TOKENS, "dim": DIM, "at_start": memory()}

    start = time.monotonic()
    with torch.no_grad(), context_parallel(group):
        h_BTD, state = decoder.eval().hidden(part)
    assert h_BTD.isfinite().all()
    assert state.seen == TOKENS
    after = decoder(ids[:, -1:], state)[0]
    assert_exact(group.gather(after), after.expand(group.size, -1, -1), "the next token's logits on all ranks")
    report |= {"prompt_seconds": round(time.monotonic() - start, 1), "prompt": memory()}

    start = time.monotonic()
    with context_parallel(group):
        loss = decoder.train().loss(part, labels, reduction="sum") / TOKENS
    loss.backward()
    for p in decoder.parameters():
        p.grad = group.gather(p.grad[None]).sum(0)
        assert p.grad.isfinite().all()
    mean = group.gather(loss.detach()[None]).sum()
    torch.optim.SGD(decoder.parameters(), lr=0.1).step()
    report |= {"loss": round(mean.item(), 4), "step_seconds": round(time.monotonic() - start, 1), "step": memory()}
    print(json.dumps(report), flush=True)


def memory():
    """Return this process's peak memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llp", "latte", "linear", "elita"])
def test_a_prompt_and_a_step_of_a_million_tokens(name, tmp_path):
    case = {name: [2, "tests.parallel.test_long", "a_prompt_and_a_step", name]}
    errors = run_processes(2, case, tmp_path, 3500)
    print(*(file.read_text().strip() for file in sorted(tmp_path.glob("*.out"))), sep="\n")
    assert errors[name] == ""
