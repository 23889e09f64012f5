"""A prompt and a step of training of very many tokens on two processes; prints seconds and memory of each."""

import json
import resource
import time

import torch

from subquad.models import Decoder, DecoderConfig
from subquad.parallel import context_parallel
from subquad.testing import assert_exact

OPTIONS = {"llp": {"segment": 256}, "elita": {"horizon": 1 << 20}}


def a_prompt_and_a_step(group, name, tokens, dim):
    """A prompt of `tokens` tokens for a small model of bytes, all ranks together, then one training step on as many."""
    torch.manual_seed(0)
    position = "rope" if name == "llp" else "none"
    shape = {"vocab_size": 256, "dim": dim, "num_layers": 2, "num_heads": 2, "position": position}
    decoder = Decoder(DecoderConfig(**shape, attention=name, options=OPTIONS))
    decoder.gradient_checkpointing = True
    ids = torch.randint(0, 256, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    part, labels = group.part(ids[:, :-1]), group.part(ids[:, 1:])
    report = {"mechanism": name, "rank": group.rank, "tokens": tokens, "dim": dim, "at_start": memory()}

    start = time.monotonic()
    with torch.no_grad(), context_parallel(group):
        h_BTD, state = decoder.eval().hidden(part)
    assert h_BTD.isfinite().all()
    assert state.seen == tokens
    after = decoder(ids[:, -1:], state)[0]
    assert_exact(group.gather(after), after.expand(group.size, -1, -1), "the next token's logits on all ranks")
    report |= {"prompt_seconds": round(time.monotonic() - start, 1), "prompt": memory()}

    start = time.monotonic()
    with context_parallel(group):
        loss = decoder.train().loss(part, labels, reduction="sum") / tokens
    loss.backward()
    for p in decoder.parameters():
        p.grad = group.gather(p.grad[None]).sum(0)
        assert p.grad.isfinite().all()
    mean = group.gather(loss.detach()[None]).sum()
    torch.optim.SGD(decoder.parameters(), lr=0.1).step()
    report |= {"loss": round(mean.item(), 4), "step_seconds": round(time.monotonic() - start, 1), "step": memory()}
    print(json.dumps(report), flush=True)


def memory():
    """The most that this process has held so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
