"""Arguments that several commands share, with their help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from halfstep.config.run import Backend

_OFF = Parameter(negative="", show_default=False)
Flag = Annotated[bool, _OFF]
Json = Annotated[bool, _OFF, Parameter(help="Print the data as JSON.")]
Device = Annotated[
    str | None,
    Parameter(
        help="The device, as the framework names it: cpu, cuda, cuda:1, mps; on JAX also several, cuda:0-3."
    ),
]

Overrides = Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)]

# Of a trained model.
Trained = Annotated[
    Path,
    Parameter(
        help="A run folder, for its newest checkpoint; the folder of a checkpoint; or a file that `halfstep "
        "export --to artifact` wrote."
    ),
]
OtherPolicy = Annotated[str | None, Parameter(help="The precision to run in; by default, that of the training.")]
OtherBackend = Annotated[
    Backend | None, Parameter(help="The framework to run on; by default, that of the training.")
]


@Parameter(name="*")  # each field is an option of the command
@dataclass(frozen=True)
class Source:
    """What a command takes of a trained model, and where it finds the rest."""

    weights: Annotated[
        Literal["model", "ema"] | None,
        Parameter(
            help="`model` for the latest weights, `ema` for their moving average; by default the average, if the "
            "run kept one."
        ),
    ] = None
    data: Annotated[str | None, Parameter(help="Where the data is now, if it moved since the run.")] = None
    validation: Annotated[
        str | None,
        Parameter(
            help="Another text to hold out, or where that of the run is now, if it moved: a file or a folder. The "
            "text that the model was trained on is not needed then."
        ),
    ] = None
    device: Device = None


AS_TRAINED = Source()
