"""Names of torch's functions by what they compute: islands of a policy, and kinds of operation to an audit."""

from typing import Any

LOSSES = (
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "poisson_nll_loss binary_cross_entropy_with_logits gaussian_nll_loss ctc_loss soft_margin_loss "
    "hinge_embedding_loss cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "triplet_margin_loss multilabel_soft_margin_loss"
)
NORMS = "layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize"
SOFTMAX = "softmax log_softmax softmin gumbel_softmax logsumexp"
# Products besides linear and matmul.
KERNELS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d bilinear tensordot inner dot vdot "
    "outer addbmm addmv addr chain_matmul"
)


def named(names: str, *places: Any) -> list[Any]:
    """Returns the functions of these names, wherever torch has them: `F.softmax`, `torch.softmax`, ..."""
    return [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]
