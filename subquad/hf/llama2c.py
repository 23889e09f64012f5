"""Checkpoints of llama2.c (A. Karpathy, github.com/karpathy/llama2.c), version 0 of its format.

Seven int32: D, hidden width F, layers L, heads H, key heads G, vocabulary V (negative: untied head), positions N. Then
float32: embedding [V, D], attention norms [L, D], q [L, D, D], k and v [L, GK, D], out [L, D, D], feed-forward norms
[L, D], gate [L, F, D], down [L, D, F], up [L, F, D], last norm [D], two tables of positions [N, K / 2] that are not
used, and the head [V, D] if untied. K = D / H; all little-endian.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.config import check_at_least
from subquad.hf.config import SubquadConfig
from subquad.hf.model import SubquadForCausalLM
from subquad.models.config import DecoderConfig

NORM_EPS = 1e-5
BOS = 1
"""Begins every text, and therefore also ends the previous one."""
_MAGIC = 0x616B3432
_HEADER = 7 * 4


class Header(NamedTuple):
    """The seven integers of the header, in file order."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int

    @property
    def channels(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the head."""
        return self.vocab > 0

    def parts(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the tensors' names (ours, with all layers in one tensor) and shapes, in file order."""
        d, f, n, v = self.dim, self.hidden, self.layers, abs(self.vocab)
        kv = self.channels * self.kv_heads
        head: list[tuple[str, tuple[int, ...]]] = [] if self.tied else [("head.weight", (v, d))]
        return [
            ("embedding.tokens.weight", (v, d)),
            ("attention_norm.weight", (n, d)),
            ("attention.query.weight", (n, d, d)),
            ("attention.key.weight", (n, kv, d)),
            ("attention.value.weight", (n, kv, d)),
            ("attention.out.weight", (n, d, d)),
            ("feedforward_norm.weight", (n, d)),
            ("feedforward.gate.weight", (n, f, d)),
            ("feedforward.down.weight", (n, d, f)),
            ("feedforward.up.weight", (n, f, d)),
            ("norm.weight", (d,)),
            ("", (2, self.positions, self.channels // 2)),
            *head,
        ]


def read_llama2c(path: str | os.PathLike[str]) -> SubquadForCausalLM:
    """Return the model in a llama2.c checkpoint, a decoder with `full` attention, in evaluation mode.

    llama2.c rotates adjacent channels (2c, 2c + 1), we rotate (c, c + K/2): rows of q and k are reordered. Raises
    `FileNotFoundError` if there is no file and `ValueError` naming the file for another version of the format, for an
    invalid header, and for a file size that differs from the header's, all before reading tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    header = _header(path)
    with path.open("rb") as stream:
        stream.seek(_HEADER)
        arrays = {
            name: np.fromfile(stream, dtype="<f4", count=math.prod(shape)).reshape(shape)
            for name, shape in header.parts()
        }
    model = SubquadForCausalLM(_config(header))
    ours: dict[str, Tensor] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if name in ("attention.query.weight", "attention.key.weight"):
            tensor = _halves(tensor, header.channels)
        if tensor.ndim == 1 or name in ("embedding.tokens.weight", "head.weight"):
            ours["lm_head.weight" if name == "head.weight" else f"model.decoder.{name}"] = tensor
        elif name:
            ours |= {f"model.decoder.layers.{i}.{name}": tensor[i] for i in range(header.layers)}
    if header.tied:
        ours["lm_head.weight"] = ours["model.decoder.embedding.tokens.weight"]
    model.load_state_dict(ours)
    return model.eval()


def is_llama2c(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a file that ends with `.bin`, as llama2.c's checkpoints do."""
    return Path(path).suffix == ".bin" and Path(path).is_file()


def _header(path: Path) -> Header:
    size = path.stat().st_size
    if size < _HEADER:
        raise ValueError(f"{path} has {size} bytes, less than the {_HEADER} of a llama2.c checkpoint's header")
    numbers = [int(n) for n in np.fromfile(path, dtype="<i4", count=7)]
    if numbers[0] == _MAGIC:
        raise ValueError(
            f"{path} is a llama2.c checkpoint of version {numbers[1]}; only version 0, plain float32, is read"
        )
    header = Header(*numbers)
    check_at_least(1, f"{path}: ", **{name: value for name, value in header._asdict().items() if name != "vocab"})
    if header.vocab == 0:
        raise ValueError(f"{path}: vocab must not be 0")
    if header.dim % (2 * header.heads) or header.heads % header.kv_heads:
        raise ValueError(
            f"{path}: heads must divide dim into even parts and kv_heads divide heads, got dim={header.dim}, "
            f"heads={header.heads}, kv_heads={header.kv_heads}"
        )
    wanted = _HEADER + 4 * sum(math.prod(shape) for _, shape in header.parts())
    if size != wanted:
        raise ValueError(f"{path} has {size:,} bytes; its header, {header}, asks for {wanted:,}")
    return header


def _config(header: Header) -> SubquadConfig:
    config = DecoderConfig(
        vocab_size=abs(header.vocab),
        dim=header.dim,
        num_layers=header.layers,
        num_heads=header.heads,
        num_kv_heads=header.kv_heads,
        attention="full",
        max_positions=header.positions,
        norm="rms",
        norm_eps=NORM_EPS,
        feedforward="swiglu",
        ff_dim=header.hidden,
        tie_embeddings=header.tied,
    )
    return SubquadConfig.from_decoder(config, bos_token_id=BOS, eos_token_id=BOS)


def _halves(x_LCD: Tensor, channels: int) -> Tensor:
    """Reorder the rows of each head from 0, 1, 2, 3, ... to 0, 2, ..., 1, 3, ..."""
    pairs = x_LCD.unflatten(1, (-1, channels // 2, 2))
    return pairs.transpose(2, 3).flatten(1, 3)
