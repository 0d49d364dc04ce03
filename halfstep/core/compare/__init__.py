"""Are two ways to train the same? Answers with their evidence, and with how sure they are.

gaps          the verdict on the gaps of paired runs: same, different, or cannot tell
divergence    the first step at which curves part, by a band over all steps and layers
shadow        one step beside the same step in fp32, and beside noise of its format
"""
