"""Are two ways to train the same? Answers with their evidence, and with how sure they are.

gaps          the verdict on the gaps of paired runs: same, different, or cannot tell
divergence    the first step at which curves part, by a band over all steps and layers
shadow        one step beside the same step in fp32, and beside noise of its format
"""

from halfstep.core.compare.divergence import FEWEST_FOR_BAND, Divergence, Series, band, first_divergence
from halfstep.core.compare.gaps import CompareError, Interval, Kind, Verdict, seed_spread, t_quantile, verdict

__all__ = [
    "FEWEST_FOR_BAND",
    "CompareError",
    "Divergence",
    "Interval",
    "Kind",
    "Series",
    "Verdict",
    "band",
    "first_divergence",
    "seed_spread",
    "t_quantile",
    "verdict",
]
