"""Loading that fits exactly."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


class StrictModel(PreTrainedModel):
    """A transformers model that refuses weights which do not fit, where transformers only warns."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, but weights that are missing or left over raise `ValueError`."""
        wants_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys"):
            if info[problem]:
                names = ", ".join(sorted(str(key) for key in info[problem]))
                raise ValueError(f"the weights do not fit the configuration: {problem.replace('_', ' ')}: {names}")
        return (model, info) if wants_info else model
