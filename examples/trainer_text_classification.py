"""transformers' text classification example under a precision policy: a small BERT tells two topics apart.

    pip install '.[torch]' accelerate transformers
    python examples/trainer_text_classification.py --output_dir out --num_train_epochs 2

The script is one for transformers.Trainer. Two lines differ from the one that takes `--bf16`: docs/integrations.md
shows them. Weights are random and the data is made here, so that nothing is downloaded.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments, set_seed

from halfstep.integrations.transformers import Trainer

VOCABULARY, LENGTH, CLS = 64, 12, 1


def sentences(count, seed):
    """Returns examples: the words of a topic are those of one half of the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    examples = []
    for label in torch.randint(2, (count,), generator=draw).tolist():
        words = torch.randint(2, VOCABULARY // 2, (LENGTH,), generator=draw) + label * VOCABULARY // 2
        examples.append({"input_ids": [CLS, *words.tolist()], "label": label})
    return examples


def accuracy(predicted):
    """Returns the share of right answers."""
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main(arguments=None):
    """Reads the command line, trains, evaluates, and returns the trainer."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=arguments)
    set_seed(args.seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
    trainer = Trainer(
        policy="bf16-mixed",
        model=model,
        args=args,
        train_dataset=sentences(256, 0),
        eval_dataset=sentences(64, 1),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    print(trainer.evaluate())
    return trainer


if __name__ == "__main__":
    main()
