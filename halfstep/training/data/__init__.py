"""What a run reads: from a source to the tokens of each update. Each row imports only rows above it.

types, file_kinds, permutation, prefetch
token_bytes
corpus, tokenizer_base
index, tokenizer_libraries
checksums, walk
shards, text, tokenizers
packed, batches
load, and pack/: sources <- blocks <- encode <- writer, repair <- pack <- train_tokenizer
"""
