"""Data sets: windows of text tokens, labelled sequences (`labelled`), images and memory probes."""

from typing import TYPE_CHECKING

from subquad.lazy import facade

if TYPE_CHECKING:
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

# Windows and shards of tokens need no extra, texts and images need `train`.
__getattr__ = facade(
    __name__,
    {
        "Corpus": "corpus",
        "DataConfig": "config",
        "TokenSet": "token_set",
        "TokenShard": "shards",
        "load_images": "images",
        "load_tokenizer": "tokenizers",
        "prepare": "corpus",
        "windows_of": "windows",
        "write_tokens": "token_writer",
    },
)
__dir__ = __all__.copy
