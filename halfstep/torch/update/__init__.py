"""One update: sums of gradients, norm, clipping, skips; `prepare`, its checks, the summary, results read back."""
