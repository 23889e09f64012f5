"""Read a long prompt once, save what the model remembers of it, and continue from the file later.

The state of a sub-quadratic mechanism has a fixed size: it takes as many bytes after a million tokens as after a
thousand. Run examples/train_on_a_text.py first, then: python examples/generate_with_a_saved_state.py [RUN_FOLDER]
"""

import statistics
import sys
from pathlib import Path

from subquad import State
from subquad.generation import generate
from subquad.training.runs import load_run


def main(folder: str = "runs/example") -> None:
    """Generate 40 tokens, save the state, load it again and generate 40 more."""
    run = load_run(folder)
    file = Path(folder) / "state.safetensors"
    prompt = run.tokenizer.encode(Path(statistics.__file__).read_text(encoding="utf-8")).ids

    first = generate(run.decoder, prompt, max_new_tokens=40, temperature=0.8, seed=0)
    tokens = list(first)
    first.state.save(file, model=run.decoder)  # with a checksum of itself and of the model's weights
    print(f"{len(prompt):,} tokens read; the state takes {file.stat().st_size:,} bytes")

    # Later, in another process: the state has read every token but the last one, so the next prompt begins with it.
    state = State.load(file, model=run.decoder)  # refused if the file is damaged or belongs to another model
    more = list(generate(run.decoder, tokens[-1:], state=state, max_new_tokens=40, temperature=0.8, seed=1))
    print(run.tokenizer.decode(tokens + more))


if __name__ == "__main__":
    main(*sys.argv[1:])
