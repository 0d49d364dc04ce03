"""The public names of halfstep and its backends are loaded when used; a missing framework has a remedy."""

import subprocess
import sys

import pytest

from halfstep.core.errors import how_to_install

BACKENDS = {"torch": "torch", "jax": "jax", "mlx": "mlx.core"}


def run_python(code):
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "package",
    ["halfstep", pytest.param("halfstep.torch", marks=pytest.mark.prove), "halfstep.jax", "halfstep.mlx"],
)
def test_every_public_name_is_loaded_when_it_is_used(package):
    run_python(
        f"import sys, {package} as package\n"
        "assert not {'torch', 'jax', 'mlx', 'numpy'} & sys.modules.keys()\n"
        "ours = [name for name in sys.modules if name.startswith('halfstep.')]\n"
        "assert package.__name__ != 'halfstep' or not ours, ours\n"
        "assert len(package.__all__) > 5 and set(package.__all__) == set(dir(package))\n"
        "for name in package.__all__: assert getattr(package, name).__name__ == name, name\n"
        "try: package.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit(1)\n"
        "assert 'torch._dynamo' not in sys.modules  # which takes as long to import as all of ours\n"
    )


@pytest.mark.parametrize(("backend", "framework"), BACKENDS.items())
def test_without_its_framework_a_backend_says_how_to_install_it(backend, framework):
    run_python(
        "import sys\n"
        f"sys.modules['{framework}'] = None\n"
        f"import halfstep.{backend} as package\n"
        "from halfstep.core.errors import HalfstepError\n"
        "try: package.quantize\n"
        "except HalfstepError as error:\n"
        f"    assert '`halfstep.{backend}.quantize` needs {backend}, which cannot be' in str(error), error\n"
        f"    assert error.hint == {how_to_install(backend)!r}\n"
        "else: raise SystemExit(1)\n"
    )


def test_no_framework_is_loaded_by_the_probe():
    run_python("import sys, halfstep.tools.probe; assert not {'torch', 'jax', 'mlx', 'numpy'} & set(sys.modules)")
