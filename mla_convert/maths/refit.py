"""Refits in closed form: a linear map fitted again to the inputs that it really gets, and the weights of tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.maths.linalg import damped_power


def ridge_refit(
    weight: Float[Tensor, "J I"], cross: Float[Tensor, "J I"], moment: Float[Tensor, "I I"], *, ridge: float
) -> Float[Tensor, "J I"]:
    """Return the W' minimising E‖t - W' u‖² + λ‖W' - W‖², the squares of ridge regression towards `weight`.

    W' = W + (E[t u^T] - W E[u u^T]) (E[u u^T] + λI)^(-1). Where W is the best map of u to t already, or λ is large,
    W' is W.

    Args:
        weight: W.
        cross: E[t u^T], of what is wanted and what is there; tokens weighted as in `moment`.
        moment: E[u u^T].
        ridge: λ as a share of the moment's mean eigenvalue.
    """
    w_JI, moment_II = weight.double(), moment.double()
    change_JI = (cross.double() - w_JI @ moment_II) @ damped_power(moment_II, -1.0, ridge)
    return (w_JI + change_JI).to(weight.dtype)


def token_weights(states: Float[Tensor, "*tokens D"], *, most: float) -> Float[Tensor, "*tokens"]:
    """Return each token's weight 1/‖h‖² as a multiple of the median token's, at most `most`; float64.

    What reads a residual stream h normalises it first, so that an error counts as a share of its energy. Without a
    limit a few tokens of little energy would be all that counts.
    """
    energy = states.double().square().mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    return (energy.median() / energy).clamp_max(most)
