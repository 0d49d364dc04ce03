"""Machine files: every number has its source, and a GPU without one is refused with the way to make one."""

from importlib import resources

import pytest

from halfstep.config.machines import load_machine, machine_names
from halfstep.core.errors import UnknownRecipeError


@pytest.mark.parametrize("name", machine_names())
def test_every_number_has_its_source(name):
    machine = load_machine(name)
    assert machine.memory > machine.context > 0
    assert machine.rates.bf16 > machine.rates.fp32
    text = (resources.files("halfstep.config") / "machines" / f"{name}.toml").read_text(encoding="utf-8")
    for line in text.partition("[rates]")[0].splitlines():
        key = line.partition(" ")[0]
        assert "#" in line or key in ("", "name", "kind", "capability", "architecture", "gpus"), line


def test_a_gpu_without_a_machine_file_says_how_to_make_one():
    with pytest.raises(UnknownRecipeError) as error:
        load_machine("gaudi3")
    assert "halfstep probe --save mine.toml" in str(error.value)
