"""Low-rank adaptation (LoRA), as PEFT has it: read by the command line without loading torch."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Low-rank factors beside the weights of a trained model, which stay as they are."""

    rank: int = 0
    """Rank r of the factors; 0: no factors, all weights train."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank must be at least 0, got {self.rank}")
