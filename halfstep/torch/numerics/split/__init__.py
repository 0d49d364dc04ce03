"""Split masters in a model: a parameter that holds the bf16 half of an fp32 master.

operand       what a layer multiplies: the bf16 half or the joined master, and who receives its gradient
writes        notices a write to a half that is not ours, and refuses it
parameter     makes a parameter a half, fetches its gradient, and makes it whole again
holder        a module that holds halves: its state dict, loading and copies
"""
