"""Generation of one sequence that carries the model's state: for constant-state mechanisms memory does not grow.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from subquad.generation.config import SamplingConfig
from subquad.models import Decoder, PerceiverAR
from subquad.state import State


def generate(
    model: Decoder,
    prompt: Sequence[int],
    /,
    *,
    state: State | None = None,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_token: int | None = None,
    prefill_chunk: int = 4096,
) -> Generation:
    """Iterate over up to `max_tokens` tokens that continue `prompt` (token ids, at least one).

    `temperature` divides the logits; 0 takes the likeliest token. `top_k` keeps the k likeliest tokens, `top_p` the
    fewest tokens whose probabilities sum to at least p. `seed` repeats a sample. `stop_token` is returned and ends the
    sequence. The prompt is read `prefill_chunk` tokens at a time, after those that made `state`; by a `PerceiverAR` in
    one piece.

    Raises `ValueError` for an empty prompt, a token outside the vocabulary or a number out of range.
    """
    sampling = SamplingConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        prefill_chunk=prefill_chunk,
    )
    return Generation(model, prompt, sampling, state=state, stop_token=stop_token)


class Generation(Iterator[int]):
    """The tokens that `generate` samples, one at a time, each computed when it is asked for.

    `state` is what the model has read: the prompt (after `prefill`, all of it but the last token) and every token
    returned but the last. To go on later, keep `state` and begin the next prompt with that last token.
    """

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        /,
        *,
        state: State | None = None,
        stop_token: int | None = None,
    ) -> None:
        vocab_size = model.config.vocab_size
        if not len(prompt):
            raise ValueError("the prompt must hold at least one token, got none")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"the prompt's tokens must be between 0 and {vocab_size - 1}, got {token}")
        self.state = state
        self._model = model
        self._sampling = sampling
        self._stop_token = stop_token
        self._unread = [int(token) for token in prompt]
        self._left = sampling.max_tokens
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def prefill(self) -> None:
        """Read the prompt but for its last token, in chunks; asking for the first token does it too."""
        chunk = self._sampling.prefill_chunk
        with _inference(self._model):
            if isinstance(self._model, PerceiverAR) and len(self._unread) > 1:
                # In one piece, since each piece ends with latents that the next one would make history.
                self.state = self._model.read(self._as_tensor(self._unread[:-1]), self.state)
                del self._unread[:-1]
            while len(self._unread) > 1:
                tokens = self._unread[: min(chunk, len(self._unread) - 1)]
                _, self.state = self._model.hidden(self._as_tensor(tokens), self.state)
                del self._unread[: len(tokens)]

    def __next__(self) -> int:
        if self._left == 0:
            raise StopIteration
        self.prefill()
        with _inference(self._model):
            logits_BTV, self.state = self._model(self._as_tensor(self._unread), self.state)
        token = sample(logits_BTV[0, -1], self._sampling, self._random)
        self._unread = [token]
        self._left = 0 if token == self._stop_token else self._left - 1
        return token

    def _as_tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], dtype=torch.long, device=next(self._model.parameters()).device)


def sample(logits_V: Tensor, sampling: SamplingConfig, random: torch.Generator, /) -> int:
    """Draw a token from softmax(logits / temperature), cut to `top_k` and `top_p`; on the CPU in float64.

    Raises `ValueError` where a logit is not finite.
    """
    logits_V = logits_V.detach().double().cpu()
    if not logits_V.isfinite().all():
        raise ValueError("the model's logits must be finite, got NaN or infinity; its weights may be damaged")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V, order_V = logits_V.sort(descending=True, stable=True)
    p_V = ((logits_V - logits_V[0]) / sampling.temperature)[: sampling.top_k].softmax(-1)
    if sampling.top_p is not None:
        p_V = p_V[p_V.cumsum(-1) - p_V < sampling.top_p]
    return int(order_V[torch.multinomial(p_V, 1, generator=random)])


@contextmanager
def _inference(model: Decoder) -> Iterator[None]:
    """Eval mode without gradients; the mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
