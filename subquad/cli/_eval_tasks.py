"""`subquad eval --tasks`: a folder's model on tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from subquad.evaluation.config import EvalConfig
from subquad.parsing import read_json_mapping

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from subquad.evaluation.harness import PreparedTasks, TaskEvaluation
    from subquad.models import Decoder

NAMES = ("tasks", "task_path", "num_fewshot", "limit", "prefix_token")
TEXTS = ("stride", "windows", "data.path", "data.skip_bad_files", "data.cache")


class Loaded(NamedTuple):
    """A model with its tokenizer, and the window that it is read in; None: what the model says of itself."""

    model: Decoder | PreTrainedModel
    tokenizer: Tokenizer | PreTrainedTokenizerBase
    length: int | None


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `--tasks` takes."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness (the extra `eval`) instead of a text")
    group.add_argument("--tasks", type=str | None, default=None, help="Tasks, groups and tags, as a,b,c.")
    group.add_argument(
        "--task_path",
        type=str | None,
        default=None,
        help="A folder with the YAML files of tasks of your own. They may run Python files: take none from strangers.",
    )
    group.add_argument(
        "--num_fewshot", type=int | None, default=None, help="Examples in a prompt, where the task does not set 0."
    )
    group.add_argument("--limit", type=int | None, default=None, help="Only the first so many examples of each task.")
    group.add_argument(
        "--prefix_token",
        type=int | None,
        default=None,
        help="The token that a text begins after (null: the separator of documents, or else the line break).",
    )


def check(chosen: Namespace) -> list[str] | None:
    """The tasks, None where a text is measured; `ValueError` for arguments that do not go together."""
    if chosen.tasks is None:
        for name in NAMES:
            if chosen[name] is not None:
                raise ValueError(f"--{name} is for tasks: name them by --tasks")
        return None
    for name in TEXTS:
        if chosen[name]:
            raise ValueError(f"--{name} is for a text and does not go with --tasks")
    names = [name.strip() for name in chosen.tasks.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--tasks must name at least one task, as a,b,c, got {chosen.tasks!r}")
    return names


def load(folder: str, config: EvalConfig, default_length: int) -> Loaded:
    """The model in a folder: a run's, or another that transformers' AutoModelForCausalLM reads, with its tokenizer."""
    from subquad.hf import SubquadConfig
    from subquad.training.runs import is_classifier, load_run

    if is_classifier(folder):
        raise ValueError(f"{folder} holds a classifier: --tasks is for language models; leave it out")
    file = Path(folder) / "config.json"
    if not file.is_file() or read_json_mapping(file).get("model_type") == SubquadConfig.model_type:
        run = load_run(folder, config.device)
        length = run.config.batch.length if run.config else default_length
        return Loaded(run.decoder, run.tokenizer, config.length or length)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from subquad.adaptation import extended
    from subquad.hf import lora, register

    register()
    model: Any
    if lora.is_extension(folder):  # transformers would put its adapter on the model with the original's positions
        model = extended.open_extension(folder).get_base_model().eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
    model.to("cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return Loaded(model, tokenizer, config.length)


def prepare(loaded: Loaded, names: list[str], chosen: Namespace, batch_size: int) -> PreparedTasks:
    """The tasks with their data, ready to ask the model."""
    from subquad.evaluation.harness import prepare_tasks

    return prepare_tasks(
        loaded.model,
        loaded.tokenizer,
        names,
        task_path=chosen.task_path,
        length=loaded.length,
        num_fewshot=chosen.num_fewshot,
        limit=chosen.limit,
        batch_size=batch_size,
        prefix_token=chosen.prefix_token,
    )


def report(evaluation: TaskEvaluation) -> str:
    """The harness's table, and what it does not say."""
    examples = sum(count["effective"] for count in evaluation.samples.values())
    return (
        f"{evaluation.table}\n"
        f"{examples:,} examples, {evaluation.requests:,} requests in {evaluation.seconds:.1f} s, in a window of "
        f"{evaluation.config['length']:,} tokens; cut to fit: {evaluation.cut:,}\n"
    )
