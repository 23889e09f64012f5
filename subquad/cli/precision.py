"""The options --dtype and --quantize of `subquad generate`, `serve` and `eval`."""

from __future__ import annotations

from subquad.cli.arguments import Parser
from subquad.models.precision import Dtype, Quantize

DTYPE_HELP = (
    "Dtype of the weights and of what passes between layers; states and sums stay float32. docs/precision.md has the "
    "errors. null: as the model was saved."
)
QUANTIZE_HELP = (
    "int8: keep the weights of linear layers as integers of eight bits with a scale for each output, and multiply them "
    "with inputs in bfloat16. null: in --dtype."
)


def add_precision(parser: Parser) -> None:
    """Add `--dtype` and `--quantize`."""
    parser.add_optional("--dtype", DTYPE_HELP, Dtype)
    parser.add_optional("--quantize", QUANTIZE_HELP, Quantize)
