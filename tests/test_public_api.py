"""Every public signature is pinned in public_api.txt: other tools are written against them.

After a change that is meant, write the file again: `python tests/test_public_api.py > tests/public_api.txt`.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PINNED = Path(__file__).with_name("public_api.txt")
ROOMS = (
    "ops", "ops.patterns", "parallel", "attention", "models", "hf", "data", "training", "adaptation", "evaluation",
    "evaluation.audit", "generation", "recipes", "serving", "testing", "train_and_report",
)  # fmt: skip
PACKAGES = ("subquad", *(f"subquad.{room}" for room in ROOMS))
MOST_NAMES = 110
METHODS = {
    "subquad.State": ("save", "load", "check", "map"),
    "subquad.attention.Attention": (
        "forward", "weights", "definition", "cost", "communication",
    ),
    "subquad.models.Decoder": ("forward", "hidden", "loss", "cost", "communication"),
    "subquad.parallel.ContextGroup": ("neighbours", "offset", "part"),
    "subquad.models.ImageModel": ("forward", "hidden", "loss", "log_prob", "sample"),
    "subquad.hf.SubquadConfig": ("from_decoder", "decoder_config"),
    "subquad.hf.SubquadForCausalLM": ("forward",),
    "subquad.data.Corpus": ("held_out_text", "train_text"),
    "subquad.evaluation.audit.AuditReport": ("check", "to_dict", "to_json", "from_dict", "load"),
    "subquad.evaluation.audit.Adapter": (
        "full", "step", "no_cache", "no_padding", "sizes", "vocab_size", "max_tokens", "passed",
    ),
    "subquad.generation.BatchDecoder": ("add", "add_samples", "cancel", "step", "run"),
    "subquad.generation.Generation": ("prefill", "read_all"),
    "subquad.generation.TextStream": ("push", "finish"),
    "subquad.training.TrainConfig": ("from_file", "to_file", "from_dict", "to_dict", "replace", "digest"),
}  # fmt: skip
"""Methods that are public besides the constructors."""

CHOSEN = {"subquad.testing": ("AttentionContract", "assert_exact", "assert_in_budget", "assert_same_maths")}
"""Of these packages only some names are promised."""
FOREIGN = ("subquad.hf.SubquadConfig",)
"""Constructors whose parameters are also another library's."""


def public_api() -> list[str]:
    """Return a line for each public name, sorted."""
    lines = []
    for package, name, value in promised():
        full, error = f"{package}.{name}", inspect.isclass(value) and issubclass(value, Exception)
        lines.append(full + signature(value) if callable(value) and not error and full not in FOREIGN else full)
        lines += [f"{full}.{method}{signature(getattr(value, method))}" for method in METHODS.get(full, ())]
    return sorted(lines)


def promised() -> Iterator[tuple[str, str, object]]:
    """Yield package, name and value of each public name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in CHOSEN.get(package, module.__all__):
            yield package, name, getattr(module, name)


def signature(value: object) -> str:
    """Return parameters and result, whether annotations are strings or types."""
    found = inspect.signature(value)
    parameters = []
    for parameter in found.parameters.values():
        default = parameter.default
        if default is not parameter.empty and "factory" in repr(default):  # of a dataclass: it has no better name
            default = Anything()
        if inspect.isfunction(default):
            default = Words(default.__name__)
        parameters.append(parameter.replace(annotation=Words(words(parameter.annotation)), default=default))
    result = "" if found.return_annotation is found.empty else f" -> {words(found.return_annotation)}"
    text = str(found.replace(parameters=parameters, return_annotation=found.empty))
    return text.replace(": <none>", "") + result


def words(annotation: object) -> str:
    """Return an annotation without module names."""
    if annotation is inspect.Parameter.empty:
        return "<none>"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"ForwardRef\('([^']*)'.*?\)", r"\1", text)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


class Words(str):
    """A string that `inspect` shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


class Anything:
    """A default that is made anew for each object."""

    def __repr__(self) -> str:
        return "..."


def test_public_signatures_are_those_that_were_promised():
    expected, actual = set(PINNED.read_text(encoding="utf-8").splitlines()), set(public_api())
    gone, new = sorted(expected - actual), sorted(actual - expected)
    assert not gone, "public names were changed or removed:\n" + "\n".join(gone) + "\nnow:\n" + "\n".join(new)
    assert not new, "public names are not pinned (see the docstring of this file):\n" + "\n".join(new)


def test_public_names_are_few():
    """Classes of mechanisms and patterns do not count."""
    from subquad.attention import Attention
    from subquad.ops.patterns import Pattern

    own = (Attention, Pattern)
    names = [name for _, name, value in promised() if not (inspect.isclass(value) and issubclass(value, own))]
    assert len(names) <= MOST_NAMES, names


def test_no_two_public_classes_share_a_name():
    """Except a mechanism and its pattern: `attention.Window`, `patterns.Window`."""
    classes = {}
    for package, name, value in promised():
        if inspect.isclass(value) and package != "subquad.ops.patterns":
            classes.setdefault(name, set()).add(value)
    assert {name: found for name, found in classes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", ["subquad", "subquad.adaptation", "subquad.testing", "subquad.training"])
def test_lazy_packages_show_their_names_and_refuse_others(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'; it has "):
        module.nothing  # noqa: B018 the access is what is tested


if __name__ == "__main__":
    print("\n".join(public_api()))
