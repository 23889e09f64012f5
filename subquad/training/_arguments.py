"""The arguments of the Trainer."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import TrainingArguments

from subquad.training.config import TrainConfig

logger = logging.getLogger(__name__)


def trains_on_cpu(config: TrainConfig) -> bool:
    """Whether the run is on the CPU, as it is where PyTorch finds no GPU."""
    return config.run.device == "cpu" or not torch.cuda.is_available()


def training_arguments(config: TrainConfig, root: Path) -> TrainingArguments:
    """The Trainer's arguments; reports, evaluations and saves are left to our callbacks."""
    cpu = trains_on_cpu(config)
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16(cpu) else "float32"
        logger.info("run.precision is %s on this machine", precision)
    arguments = TrainingArguments(
        output_dir=str(root),
        max_steps=config.run.steps,
        per_device_train_batch_size=config.batch.size,
        per_device_eval_batch_size=config.batch.size,
        gradient_accumulation_steps=config.batch.accumulation,
        max_grad_norm=config.optimizer.clip,
        seed=config.run.seed,
        bf16=precision == "bf16",
        use_cpu=cpu,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not cpu,
        ddp_find_unused_parameters=False,
        ddp_timeout=max(1, round(config.parallel.timeout)),
        label_names=["labels"],
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several GPUs take several processes (torchrun), never DataParallel
    return arguments


def _multiplies_bf16(cpu: bool) -> bool:
    """Whether the processor (or the GPU) has instructions for products of bfloat16.

    Of AMX PyTorch tells the tiles only; all processors that have them multiply bfloat16 with them (AMX-BF16).
    """
    if not cpu:
        return torch.cuda.is_bf16_supported()
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)
