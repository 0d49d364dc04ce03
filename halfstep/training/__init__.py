"""When things happen: data, schedule, the loop, checkpoints, events and progress; no framework is imported.

Read in this order: data (corpus, text, shards, batches, prefetch), schedule, events, progress, checkpoint,
signals, folder, pretrained (weightfiles, layouts), loop.
"""
