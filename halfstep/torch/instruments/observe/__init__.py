"""What the monitor measures: counts of every step, and statistics of samples.

layers        which modules of a model are watched, and the format that each of their tensors has
slots         counts of every step, which leave a compiled backward pass as gradients
weights       norms of weights, gradients and updates, and updates that were lost, of one update
sums          exponents, power sums and what other formats would lose, of many tensors at once
"""
