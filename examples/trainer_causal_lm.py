"""transformers' causal language modeling example under a precision policy: a small GPT-2 reads this file.

    pip install '.[torch]' accelerate transformers
    python examples/trainer_causal_lm.py --output_dir out --max_steps 40 --learning_rate 3e-3

The script is one for transformers.Trainer. Two lines differ from the one that takes `--bf16`: docs/integrations.md
shows them. Weights are random and the text is this script, in bytes, so that nothing is downloaded. At the end the
model writes a few bytes.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainingArguments, set_seed

from halfstep.integrations.transformers import Trainer

BLOCK = 32


def blocks():
    """Returns the bytes of this script in blocks."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [{"input_ids": block, "labels": block} for block in text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)]


def main(arguments=None):
    """Reads the command line, trains, evaluates, writes a sample, and returns the trainer."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=arguments)
    set_seed(args.seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=2 * BLOCK, **sizes))
    data = blocks()
    trainer = Trainer(
        policy="bf16-mixed",
        model=model,
        args=args,
        train_dataset=data[:-4],
        eval_dataset=data[-4:],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    print(trainer.evaluate())
    written = model.generate(torch.tensor([list(b"def ")]).to(model.device), max_new_tokens=16, do_sample=False)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    return trainer


if __name__ == "__main__":
    main()
