"""The kernel moves every byte to its place, and no other. Without a GPU, interpreted."""

from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (16, 48), (132, 144), (260, 32), (128, 256)])
def test_a_part_of_a_matrix_is_transposed_into_a_part_of_another(rows, columns):
    from halfstep.torch.kernels.transpose import transpose

    generator = torch.Generator().manual_seed(0)
    given = torch.randint(256, (rows, columns + 32), generator=generator, dtype=torch.uint8).to(DEVICE)
    out = torch.full((columns + 1, rows + 20), 9, dtype=torch.uint8, device=DEVICE)
    wanted = out.clone()
    wanted[:columns, :rows] = given[:, 16 : columns + 16].t()
    transpose(given[:, 16 : columns + 16], out[:columns, :rows])
    assert torch.equal(out, wanted)
