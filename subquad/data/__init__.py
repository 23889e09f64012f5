"""Data sets: windows of text tokens, labelled sequences (`labelled`), images and memory probes."""

from subquad.data.config import DataConfig
from subquad.data.corpus import Corpus, prepare
from subquad.data.images import load_images
from subquad.data.shards import TokenShard
from subquad.data.token_set import TokenSet
from subquad.data.token_writer import write_tokens
from subquad.data.tokenizers import load_tokenizer
from subquad.data.windows import windows_of

__all__ = [
    "Corpus",
    "DataConfig",
    "TokenSet",
    "TokenShard",
    "load_images",
    "load_tokenizer",
    "prepare",
    "windows_of",
    "write_tokens",
]
