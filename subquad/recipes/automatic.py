"""The recipe of `subquad train --data.path X`: it follows the size of the text and the minutes."""

from __future__ import annotations

import math
from typing import Any

MEGABYTE = 1e6


def automatic(text_bytes: int, minutes: float, *, layers: int = 3) -> dict[str, Any]:
    """Return the settings that train best on a text of about `text_bytes` bytes in `minutes` minutes of two CPU cores.

    They were chosen by runs of 1 to 6 minutes on texts of 0.3 to 30 MB (docs/guide.md). A short text has a small
    vocabulary, because each token must be seen often, and short windows; a text that is read many times has dropout.
    `layers` is the number of layers that the mechanisms fill. Raises `ValueError` unless both numbers are positive.
    """
    if text_bytes <= 0 or minutes <= 0:
        raise ValueError(f"text_bytes and minutes must be positive, got {text_bytes} and {minutes}")
    megabytes = text_bytes / MEGABYTE
    vocabulary = 2 ** round(math.log2(text_bytes / 600))
    # Two cores read about 2.5 MB a minute; from five passes on, each doubling of passes takes more dropout.
    passes = 2.5 * minutes / megabytes
    dropout = 0.05 * round(2 * math.log2(max(1.0, passes / 5)))
    short = megabytes < 1
    return {
        "model": {
            "dim": 128,
            "num_layers": layers,
            "num_heads": 2,
            "attention": "llp",
            "options": {"llp": {"segment": 64, "qk_norm": True}, "perceiver_ar": {"latents": 128}},
            "init_std": 0.05,
            "dropout": round(min(0.4, dropout), 2),
        },
        "data": {"vocab_size": min(4096, max(512, vocabulary))},
        "batch": {"length": 256 if short else 512, "size": 4},
        "optimizer": {"name": "muon", "lr": 0.012, "matrix_lr": 0.004, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "min_ratio": 0.05},
        "run": {"weights": "best"},
    }
