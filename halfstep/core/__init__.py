"""Numbers and decisions: what a precision is, on the standard library and numpy alone.

Read in this order: errors, formats, rounding, philox, split, scaling, roles, rules, policy, stats, choice.
"""
