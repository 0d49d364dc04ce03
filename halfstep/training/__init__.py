"""When things happen: data, schedule, the loop, checkpoints, events and progress; no framework is imported.

Read in this order: data (corpus, text, shards, batches, prefetch), session, schedule, events, progress,
checkpoint (arrays, retention, saving, keeping), faults (spikes, judge), meters, memory, signals, folder, opening,
pretrained (weightfiles, layouts), loop. What packs data begins at packing (sources, encoding, shardwriter,
shardindex, granules).
"""
