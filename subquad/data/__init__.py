"""Text to tokens to windows: sources, tokenizers, checked memory-mapped shards, a split by document, resumable order.

Importing this package loads neither torch nor tokenizers: they come with the first name that needs them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.data.config import DataConfig
from subquad.data.image_config import ImageConfig
from subquad.data.labelled_config import LabelledConfig

if TYPE_CHECKING:
    from subquad.data.corpus import Corpus, prepare, prepare_shard
    from subquad.data.images import ImageSet, load_images
    from subquad.data.labelled import LabelledCorpus, labelled_corpus
    from subquad.data.order import LargeOrder, epoch_order
    from subquad.data.packing import PackedWindows
    from subquad.data.set_windows import windows_of
    from subquad.data.shards import TokenShard
    from subquad.data.token_set import ShardError, TokenSet
    from subquad.data.token_writer import write_tokens
    from subquad.data.tokenizers import load_tokenizer, tokenizer_hash
    from subquad.data.windows import EpochOrder, Windows

_HOME = {
    "Corpus": "corpus",
    "EpochOrder": "windows",
    "ImageSet": "images",
    "LabelledCorpus": "labelled",
    "LargeOrder": "order",
    "PackedWindows": "packing",
    "ShardError": "token_set",
    "TokenSet": "token_set",
    "TokenShard": "shards",
    "Windows": "windows",
    "labelled_corpus": "labelled",
    "load_images": "images",
    "load_tokenizer": "tokenizers",
    "prepare": "corpus",
    "prepare_shard": "corpus",
    "epoch_order": "order",
    "tokenizer_hash": "tokenizers",
    "windows_of": "set_windows",
    "write_tokens": "token_writer",
}
__all__ = [
    "Corpus",
    "DataConfig",
    "EpochOrder",
    "ImageConfig",
    "ImageSet",
    "LabelledConfig",
    "LabelledCorpus",
    "LargeOrder",
    "PackedWindows",
    "ShardError",
    "TokenSet",
    "TokenShard",
    "Windows",
    "epoch_order",
    "labelled_corpus",
    "load_images",
    "load_tokenizer",
    "prepare",
    "prepare_shard",
    "tokenizer_hash",
    "windows_of",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.data' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
