"""What the audit of the first updates costs a real run: `AuditCallback` in transformers.Trainer and in Lightning.

    python benchmarks/measure/audit_callback.py [--updates 100] [--rounds 5] [--width 256] [--layers 4]

The same run of a GPT-2 in bf16 autocast is made with the callback and without, in turns, in one process, in
reverse order every other time, after a first run of each that is not counted. Timed is all of `fit` or `train`, on
a CPU in processor time of one thread, so that other processes of the machine do not count. The ratio is the median
over the rounds of each pair. The callback watches 4 % of a run's updates, and at least three. Besides, it searches
all objects of the process two or three times, for models and averages, which takes half a second after large
imports, and weighs most in a short run.

Exit code 1 if a callback costs more than 2 %.
"""

import argparse
import contextlib
import io
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

MOST = 1.02
BATCH, LENGTH, VOCABULARY = 4, 128, 1024


def rows_of(updates: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (BATCH * updates, LENGTH))]


def model_of(width: int, layers: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_layer": layers, "n_head": 4, "n_embd": width, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def in_transformers(model: GPT2LMHeadModel, rows: list[Any], audited: bool) -> Any:
    """Trains, and returns the callback."""
    from transformers import Trainer, TrainingArguments

    from halfstep.integrations.transformers import AuditCallback

    callback = AuditCallback() if audited else None
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, args, train_dataset=rows, callbacks=[callback] if callback else []).train()
    return callback


def in_lightning(model: GPT2LMHeadModel, rows: list[Any], audited: bool) -> Any:
    """Trains, and returns the callback."""
    import lightning

    from halfstep.integrations.lightning import AuditCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = AuditCallback() if audited else None
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        callbacks=[callback] if callback else [],
        enable_model_summary=False,
        **silent,
    )
    trainer.fit(Module(), DataLoader(rows, batch_size=BATCH))  # type: ignore[arg-type]
    return callback


def seconds(train: Callable[..., Any], arguments: Any, rows: list[Any], audited: bool) -> float:
    """Returns how long a run takes; what it prints is dropped."""
    model, said = model_of(arguments.width, arguments.layers), io.StringIO()
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        callback = train(model, rows, audited)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = clock() - began
    if audited and callback.audit.record is None:
        raise RuntimeError(f"nothing was watched: {said.getvalue()}")
    return taken


def compare(name: str, train: Callable[..., Any], arguments: Any) -> bool:
    """Prints a line; returns whether the callback costs no more than its bar."""
    rows = rows_of(arguments.updates)
    plain: list[float] = []
    audited: list[float] = []
    for turn in range(-1, arguments.rounds):
        for with_audit in (False, True)[:: 1 if turn % 2 else -1]:
            taken = seconds(train, arguments, rows, with_audit)
            if turn >= 0:
                (audited if with_audit else plain).append(taken)
    ratio = statistics.median(a / b for a, b in zip(audited, plain, strict=True))
    print(
        f"{name:12} {statistics.median(plain):7.2f} s without, {statistics.median(audited):7.2f} s with: "
        f"{ratio:.3f} of the time, at most {MOST}"
    )
    return ratio <= MOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = f"{arguments.layers} layers, {arguments.width} wide"
    print(f"{arguments.updates} updates of {BATCH} x {LENGTH} tokens, {size}, torch {torch.__version__}")
    ways = {"transformers": in_transformers, "lightning": in_lightning}
    within = [compare(name, train, arguments) for name, train in ways.items()]
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
