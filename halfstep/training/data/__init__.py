"""What a run reads: from a source to the tokens of each update. Each row imports only rows above it.

types
tokenizer_base
corpus, index
walk
shards, text, tokenizers
packed, batches
pack/: sources <- blocks <- encode <- writer <- pack <- train_tokenizer
load
"""
