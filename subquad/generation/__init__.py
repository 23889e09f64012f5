"""Sample texts and images from models that carry a state from token to token.

`generate` yields one token at a time; `generate_batch` and `beam_search` return continuations with their `tokens` and
the reason why they are `finished`; `generate_images` and `complete_images` return pixels. The drafts that guess tokens
ahead are in `speculative`.
"""

from subquad.generation.batch import BatchDecoder, generate_batch
from subquad.generation.beam import beam_search
from subquad.generation.generate import Generation, generate
from subquad.generation.images import complete_images, generate_images
from subquad.generation.sampling import SamplingConfig
from subquad.generation.stream import TextStream

__all__ = [
    "BatchDecoder",
    "Generation",
    "SamplingConfig",
    "TextStream",
    "beam_search",
    "complete_images",
    "generate",
    "generate_batch",
    "generate_images",
]
