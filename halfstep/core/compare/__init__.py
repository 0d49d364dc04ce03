"""Are two ways to train the same? Answers with their evidence, and with how sure they are.

gaps          the verdict on the gaps of paired runs: same, different, or cannot tell
parting       the first step at which curves part, by a band over all steps and layers
shadow        one step beside the same step in fp32, and beside noise of its format
"""

from halfstep.core.compare.gaps import CompareError, Interval, Kind, Verdict, seed_spread, t_quantile, verdict
from halfstep.core.compare.parting import FEWEST_FOR_BAND, Parting, Series, band, first_parting

__all__ = [
    "FEWEST_FOR_BAND",
    "CompareError",
    "Interval",
    "Kind",
    "Parting",
    "Series",
    "Verdict",
    "band",
    "first_parting",
    "seed_spread",
    "t_quantile",
    "verdict",
]
