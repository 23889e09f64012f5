"""Run a conversion from the original, or from its last complete stage, to the report."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from subquad import disk
from subquad.adaptation import measure
from subquad.adaptation.config import ConvertConfig
from subquad.adaptation.conversion_report import check_reach, explain
from subquad.adaptation.replace import Replacement, replace_attention, replaced_layers
from subquad.adaptation.source import Source, Text, batches, load_source, read_text
from subquad.adaptation.transfer import Progress, match, tune
from subquad.checksums import CHECKSUMS, check_unchanged, write_checksums
from subquad.config import differences
from subquad.data.files import MODEL_FILES
from subquad.hf import SubquadForCausalLM, lora
from subquad.models import Decoder
from subquad.parsing import read_json_mapping
from subquad.state import weights_hash
from subquad.training.checkpoint import replace_folder, share
from subquad.training.processes import device_type

SETTINGS, RECORD = "conversion.json", "stage.json"
NAMES = ("original", "replaced", "matched", "tuned")
"""Stages in order."""


class Stages:
    """The stages of a conversion in `folder`, with `conversion.json`; `ValueError` for other files or settings."""

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder = Path(folder)
        file = self.folder / SETTINGS
        if file.is_file():
            changed = differences(read_json_mapping(file), settings)
            if changed:
                changes = "; ".join(changed)
                raise ValueError(f"{folder} holds another conversion ({changes}); --out must name another folder")
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(f"{folder} holds files that no conversion wrote; --out must name a new folder")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{folder} is a file; --out must name a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        disk.write_atomically(file, (json.dumps(settings, indent=2) + "\n").encode())

    def folder_of(self, name: str) -> Path:
        """Return the folder of the stage `name`."""
        return self.folder / "stages" / f"{NAMES.index(name) + 1}-{name}"

    def record(self, name: str) -> dict[str, Any] | None:
        """Return the measurements of the stage `name`, or None if it is not complete."""
        file = self.folder_of(name) / RECORD
        return dict(read_json_mapping(file)) if file.is_file() else None

    def model(self, name: str) -> SubquadForCausalLM:
        """Load the model that the complete stage `name` saved."""
        check_unchanged(self.folder_of(name))
        return SubquadForCausalLM.from_pretrained(self.folder_of(name), local_files_only=True).eval()

    def save(self, name: str, record: dict[str, Any], model: SubquadForCausalLM | None = None) -> None:
        """Save the measurements and the model of the stage `name`, all at once: it is complete then."""
        target = self.folder_of(name)
        aside = target.with_name(f".saving-{target.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with disk.writing(target):
            if model is not None:
                model.save_pretrained(aside)
                write_checksums(aside)
            (aside / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            share(aside)
            disk.sync(aside)
        replace_folder(aside, target)


REPORT = "report.json"
FORMAT = 1
_UNSETTLED = ("out", "device")
"""Settings that may differ when a conversion resumes."""


class Conversion:
    """A conversion that is ready to run: model and text are loaded and checked, and `config.out` is its folder.

    Raises as `load_source`, `replace_attention`, `read_text` and `Stages`, before any training.
    """

    def __init__(self, folder: str | Path, config: ConvertConfig, progress: Progress | None = None) -> None:
        lora.require_peft()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.progress = progress
        self.source: Source = load_source(folder)
        self.device = device_type(config.device)
        self.teacher = self.source.decoder.to(self.device)
        self.layers = replaced_layers(self.teacher.config.num_layers, config.keep_every)
        replacement = self._replace()
        self.new, self.student_config = replacement.new, replacement.decoder.config
        own = self.source.model.config
        self.text: Text = read_text(
            config.data, str(folder), self.source.tokenizer, own.bos_token_id, config.batch.length
        )
        most = self.teacher.most_tokens
        if most is not None and config.batch.length > most:
            raise ValueError(f"batch.length={config.batch.length} exceeds the model's {most} learned positions")
        check_reach(config.attention, config.options.get(config.attention, {}), config.batch.length)
        settings = {name: value for name, value in config.to_dict().items() if name not in _UNSETTLED}
        settings |= {"model": weights_hash(self.teacher), "text": self.text.fingerprint}
        settings["data"].pop("cache")
        self.stages = Stages(config.out, settings)

    def run(self, **about: Any) -> dict[str, Any]:
        """Run all incomplete stages and return the report, which is also written to the folder.

        Each stage that runs now keeps `about` (the machine, for example); the report repeats that of the last stage.
        """
        records = {name: self.stages.record(name) or self._stage(name, about) for name in NAMES}
        report = self._report(records) | records[NAMES[-1]]["about"]
        self._finish(report)
        return report

    def _stage(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        """Run the stage `name`, save it, and return its measurements."""
        begin = time.perf_counter()
        config, seed = self.config, self.config.seed + 1000 * NAMES.index(name)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, record = self._made(name)
        decoder: Decoder = self.teacher if model is None else model.decoder
        record |= measure.measure(decoder, self.text.held_out, self.source.tokenizer, config)
        if name in ("original", "tuned"):
            record["decoding"] = measure.decoding(decoder, self.text.held_out, config)
        if name in ("replaced", "matched"):
            record["errors"] = measure.matching(self.teacher, decoder, self.layers, self.text.held_out, config)
        if name == "tuned":
            record["branches"] = measure.branches(decoder, self.layers, self.text.held_out, config)
        record |= {"seconds": time.perf_counter() - begin, "about": about}
        self.stages.save(name, record, model)
        return record

    def _made(self, name: str) -> tuple[SubquadForCausalLM | None, dict[str, Any]]:
        """Return the model after the stage `name` (None: the original), and a record with its training curve."""
        config = self.config
        if name == "original":
            return None, {}
        if name == "replaced":
            return self._wrapped(self._replace().decoder), {}
        model: Any = self.stages.model(NAMES[NAMES.index(name) - 1])
        model.to(self.device)
        read = batches(self.text.train, config.batch.length, config.batch.size, config.seed + NAMES.index(name))
        if name == "matched":
            curve = match(self.teacher, model.decoder, self.layers, self.new, read, config, self.progress)
        else:
            curve = tune(model, self.new, read, config, self.progress)
        return model.eval(), {"curve": dataclasses.asdict(curve)}

    def _replace(self) -> Replacement:
        options = self.config.options.get(self.config.attention, {})
        return replace_attention(
            self.teacher, self.config.attention, keep_every=self.config.keep_every, options=options
        )

    def _wrapped(self, decoder: Decoder) -> SubquadForCausalLM:
        """Wrap `decoder` as a transformers model with the original's special tokens."""
        own = self.source.model.config
        kept = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return SubquadForCausalLM.around(decoder, **kept).eval()

    def _report(self, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the measurements of all stages, and the gap between the last and the first."""
        first, last = records["original"], records["tuned"]
        gaps = [
            {"start": a["start"], "stop": a["stop"], "tokens": a["tokens"], "gap": b["loss"] - a["loss"]}
            for a, b in zip(first["by_position"], last["by_position"], strict=True)
        ]
        config = self.student_config
        with torch.device("meta"):
            student = dict(Decoder(config).named_parameters())
        report = {
            "format": FORMAT,
            "model": str(self.source.folder),
            "settings": self.config.to_dict(),
            "attention": self.config.attention,
            "options": config.options.get(self.config.attention, {}),
            "layers": {
                "replaced": [i + 1 for i in self.layers],
                "kept": [i + 1 for i in range(config.num_layers) if i not in self.layers],
            },
            "parameters": {
                "original": self.teacher.num_parameters(),
                "converted": sum(p.numel() for p in self.stages.model("tuned").parameters()),
                "new": sum(student[name].numel() for name in self.new),
            },
            "text": {"train_tokens": len(self.text.train), "held_out_tokens": len(self.text.held_out)},
            "stages": [{"stage": name, **records[name]} for name in NAMES],
            "gap": {"loss": last["loss"] - first["loss"], "by_position": gaps},
        }
        return {**report, "explanation": explain(report)}

    def _finish(self, report: dict[str, Any]) -> None:
        """Copy model, tokenizer and report to the folder's top, `config.json` last: without it there is no model."""
        folder = Path(self.config.out)
        stage = self.stages.folder_of("tuned")
        kept = [name for name in MODEL_FILES if (self.source.folder / name).is_file()]
        for name in kept:
            disk.write_atomically(folder / name, (self.source.folder / name).read_bytes())
        disk.write_atomically(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
        names = sorted(path.name for path in stage.iterdir() if path.name not in (RECORD, CHECKSUMS, *kept))
        for name in sorted(names, key=lambda name: name == "config.json"):
            disk.write_atomically(folder / name, (stage / name).read_bytes())
        write_checksums(folder, [*kept, *names])
        share(folder)


def convert(
    folder: str | Path, config: ConvertConfig | None = None, /, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Convert the model in `folder` into `config.out`, or resume it; return the report. Raises as `Conversion`."""
    return Conversion(folder, config or ConvertConfig(), progress).run()
