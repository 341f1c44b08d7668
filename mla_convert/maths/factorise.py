"""The joint low-rank factorisation of content keys and values (two-sided weighted PCA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.maths.linalg import damped_powers, hermitian


@dataclass(frozen=True)
class JointFactors:
    """A rank-C projection of the stacked content keys and values y [J], J = 2·G·K: y ~ up (down y).

    Attributes:
        down: [C J] float64.
        up: [J C] float64.
        spectrum: all J eigenvalues of the weighted moment, descending: the loss each direction would cost.
    """

    down: Float[Tensor, "C J"]
    up: Float[Tensor, "J C"]
    spectrum: Float[Tensor, " J"]

    @property
    def lost(self) -> float:
        """The share of the weighted energy outside the C directions kept."""
        total = self.spectrum.sum().item()
        return self.spectrum[self.down.shape[0] :].sum().item() / total if total > 0 else 0.0


def factorise_joint(
    moment: Float[Tensor, "J J"], metric: Float[Tensor, "J J"], rank: int, *, damping: float
) -> JointFactors:
    """Return the rank-`rank` projection minimising E‖A^½ (y - up down y)‖² under y's second moment.

    The optimum is U = the top eigenvectors of A^½ E[y y^T] A^½, down = U^T A^½ and up = A^(-½) U (two-sided whitening;
    with A the identity it is the PCA of SVD-LLM, arXiv:2403.07378, and CARE); any other root of A gives the same two.
    At full rank up·down is the identity.

    Given the latent c = down y, `up` is the least-squares solution E[y c^T] E[c c^T]^(-1), whatever the metric, so that
    refitting W_UK and W_UV under the same moment changes nothing. What is left of a key is uncorrelated with c; where
    queries are independent of it, refitting W_UQ to the scores changes nothing either.

    Args:
        moment: E[y y^T], token-weighted where wanted.
        metric: A, for example the second moment of the loss gradient at y; read damped.
        damping: share of A's mean eigenvalue added to it, which bounds the inverse root.
    """
    root, inverse = _roots(hermitian(metric.double()), damping)
    values, vectors = torch.linalg.eigh(hermitian(root.mT @ moment.double() @ root))
    kept = vectors.flip(-1)[:, :rank]
    return JointFactors(kept.mT @ root.mT, inverse(kept), values.flip(-1).clamp_min(0.0))


def _roots(
    metric: Float[Tensor, "J J"], damping: float
) -> tuple[Float[Tensor, "J J"], Callable[[Float[Tensor, "J C"]], Float[Tensor, "J C"]]]:
    """Some B with B B^T = A, damped, and what applies B^(-T): a Cholesky factor where A has one that is safe to invert.

    Any such B gives the same down and up, for two of them differ by a rotation, and the eigenvectors turn with it.
    """
    mean = metric.diagonal().mean()
    if damping > 0 and mean > 0:
        lower, failed = torch.linalg.cholesky_ex(metric + damping * mean * torch.eye(len(metric)).to(metric))
        if not failed:
            return lower, lambda kept: torch.linalg.solve_triangular(lower.mT, kept, upper=True)
    root, inverse_root = damped_powers(metric, (0.5, -0.5), damping)
    return root, lambda kept: inverse_root @ kept


def truncation_error(factors: JointFactors, moment: Float[Tensor, "J J"], metric: Float[Tensor, "J J"]) -> float:
    """Return E[e^T A e] of what the factors lose, e = y - up down y: tr(A (I - UD) E[y y^T] (I - UD)^T).

    The moment and the metric A, undamped, may be others than those that the factors were made from.
    """
    lost = torch.eye(moment.shape[0], dtype=torch.float64, device=moment.device) - factors.up @ factors.down
    return torch.sum(metric.double() * (lost @ moment.double() @ lost.mT)).item()


def truncation_curve(
    factors: JointFactors, moment: Float[Tensor, "J J"], metric: Float[Tensor, "J J"]
) -> Float[Tensor, " J1"]:
    """Return :func:`truncation_error` of the first C = 0, ..., J directions of factors of full rank, J + 1 numbers.

    What C directions lose is the sum of the others, e = Σ_{c>=C} up_c (down_c y), so the errors are sums over the
    trailing C:, C: blocks of (up^T A up) ∘ (down E[y y^T] down^T). Under the moment that the factors were made from the
    down-projections are uncorrelated, and every direction costs by itself.
    """
    costs = (factors.up.mT @ metric.double() @ factors.up) * (factors.down @ moment.double() @ factors.down.mT)
    trailing = costs.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0)
    return torch.cat((trailing, trailing.new_zeros(1))).clamp_min(0.0)
