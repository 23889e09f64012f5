"""What `subquad generate` is asked for, beside model and prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from subquad.cli.arguments import check_output
from subquad.generation.config import SamplingConfig
from subquad.generation.stop import StopStrings


@dataclass(frozen=True)
class Ask:
    """What the command was asked for, beside model and prompt."""

    sampling: SamplingConfig
    stop: tuple[str, ...]
    samples: int
    beams: int
    stream: bool
    state_in: str | None
    state_out: str | None
    texts: int | None = None
    out_file: str | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> Ask:
        """From the parsed arguments; `ValueError` for those that do not go together."""
        sampling = SamplingConfig(**{field.name: values[field.name] for field in fields(SamplingConfig)})
        stop = tuple(values["stop"])
        StopStrings(stop)
        names = ("samples", "beams", "stream", "state_in", "state_out", "texts", "out_file")
        ask = cls(sampling=sampling, stop=stop, **{name: values[name] for name in names})
        for name in ("samples", "beams"):
            if getattr(ask, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(ask, name)}")
        if ask.texts is not None or ask.out_file is not None:
            ask._check_texts()
        if ask.beams > 1:
            ask._refuse_with_beams()
        if ask.state_out is not None:
            if ask.samples > 1 or ask.beams > 1:
                raise ValueError("--state-out keeps one text: it does not go with --samples or --beams")
            path = Path(ask.state_out)
            if not ask.state_out or path.is_dir():
                raise ValueError(f"--state-out must be a file, got {ask.state_out!r}")
            if not path.absolute().parent.is_dir():
                raise FileNotFoundError(f"there is no folder {path.absolute().parent} for --state-out")
        return ask

    def _check_texts(self) -> None:
        """Raise `ValueError` or `FileNotFoundError` where texts cannot be written as asked."""
        if self.texts is None or self.out_file is None:
            given = "--out-file" if self.texts is None else "--texts"
            raise ValueError(f"--texts N and --out-file FILE go together, got {given} alone")
        if self.texts < 1:
            raise ValueError(f"texts must be at least 1, got {self.texts}")
        check_output("out-file", self.out_file)
        if not self.out_file.endswith(".zip"):
            raise ValueError(f"--out-file must end with .zip: each text is a document in it, got {self.out_file!r}")
        unread = {"--samples": self.samples > 1, "--beams": self.beams > 1, "--stop": bool(self.stop)}
        unread |= {"--state-in": self.state_in is not None, "--state-out": self.state_out is not None}
        for name, is_given in unread.items():
            if is_given:
                raise ValueError(f"{name} does not go with --texts; leave it out")

    def _refuse_with_beams(self) -> None:
        """Raise `ValueError` for options that a search would not read."""
        if self.samples > 1 or self.stop:
            name = "--stop" if self.stop else "--samples"
            raise ValueError(f"a search with --beams gives one text without stop strings: leave {name} out")
        unread = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
        for field in fields(SamplingConfig):
            value = getattr(self.sampling, field.name)
            if field.name in unread and value != field.default:
                raise ValueError(f"{field.name}={value!r} has no effect with --beams; leave it out")
