"""Use a sub-quadratic attention layer in a module of your own.

Run it: python examples/layer_in_a_module.py
"""

import torch
from torch import Tensor, nn

from subquad import attention


class Block(nn.Module):
    """A pre-norm transformer block; swap `Latte` for `Llp`, `Linear`, `Window`, ... (`attention.names()`)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = attention.Latte(dim=dim, num_heads=4, num_latents=16)
        self.feedforward = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map `x` [B, T, D] to [B, T, D]; `mask` is a bool [B, T], True for real tokens, padding anywhere."""
        mixed, _ = self.attention(self.norm(x), mask=mask)  # the second result is the state, for decoding
        x = x + mixed
        return x + self.feedforward(x)


def main() -> None:
    """Overfit a byte model on one sentence, to show that gradients reach every weight."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(b"sub-quadratic attention " * 40), dtype=torch.uint8).long()
    model = nn.Sequential(nn.Embedding(256, 64), Block(64), Block(64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(61):
        start = torch.randint(0, len(text) - 129, (8, 1))
        batch = text[start + torch.arange(129)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}: {loss.item():.3f} nats a byte")


if __name__ == "__main__":
    main()
