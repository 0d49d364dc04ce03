from .core.choice import Choice as Choice
from .core.choice import choose as choose
from .core.errors import HalfstepError as HalfstepError
from .core.formats import Format as Format
from .core.policy import Policy as Policy
from .core.rounding import cast as cast
from .core.stats.tensors import TensorStats as TensorStats
from .training.weights.pretrained import load_model as load_model

__version__: str
