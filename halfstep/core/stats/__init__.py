"""The mathematics of what formats do to tensors, in sums that merge.

tensors       one tensor as one format sees it
what_if       what another format would have lost, with a scale per tensor, row or block
"""
