"""RoPE decoupling: scores are kept whatever the mixture, slots are the best there are, constants are least squares."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.maths.decouple import KeySlots, choose_slots, substitute_rotation
from tests.maths.samples import complex_normal, generator, max_difference, normal, second_moment

# Sums of some dozens of float64 products of unit size, and eigen-decompositions of well-conditioned matrices.
TOLERANCE = 1e-12


def positive(pairs: int, size: int, kind: str = "complex", seed: int = 0, samples: int = 40) -> torch.Tensor:
    """A moment for each pair, of samples whose energies differ from pair to pair and head to head, in no order."""
    drawn = (
        complex_normal(samples, pairs, size, seed=seed)
        if kind == "complex"
        else normal(samples, pairs, size, seed=seed)
    )
    order = torch.randperm(pairs * size, generator=generator(seed + 200))
    falling = 0.6 ** order.double().view(pairs, size)
    mixed = torch.linalg.qr(complex_normal(pairs, size, size, seed=seed + 100)).Q
    mixed = mixed if kind == "complex" else torch.linalg.qr(normal(pairs, size, size, seed=seed + 100)).Q
    return second_moment(torch.einsum("lgh,nlh->nlg", mixed, drawn * falling))


def damped(metric: torch.Tensor, damping: float) -> torch.Tensor:
    mean = metric.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    return metric + damping * mean[:, None, None] * torch.eye(metric.shape[-1], dtype=metric.dtype)


def cost_of_moving(slots: KeySlots, key_moment: torch.Tensor, metric: torch.Tensor) -> float:
    """Σ over pairs of E[(residual z)^H A (residual z)], written out from the slots alone."""
    total = 0.0
    for pair in range(key_moment.shape[0]):
        residual = torch.eye(key_moment.shape[1], dtype=torch.complex128)
        for n, at in enumerate(slots.pairs):
            if at == pair:
                residual = residual - slots.unmix[n][:, None] * slots.mix[n][None, :]
        moved = residual @ key_moment[pair].to(torch.complex128) @ residual.mH
        total += torch.einsum("gh,hg->", metric[pair].to(torch.complex128), moved).real.item()
    return total


def best_cost(counts: tuple[int, ...], key_moment: torch.Tensor, metric: torch.Tensor) -> float:
    """The least cost of keeping counts[l] components of pair l, by Eckart and Young on Cholesky factors."""
    total = 0.0
    for count, moment, weight in zip(counts, key_moment, metric, strict=True):
        singular = torch.linalg.svdvals(torch.linalg.cholesky(weight).mH @ torch.linalg.cholesky(moment))
        total += singular[count:].square().sum().item()
    return total


def scores(queries: torch.Tensor, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Re Σ_l conj(a_l) e^{i theta (s - t)} z_l for queries [H S L] and keys [H S L]: [H S S]."""
    positions = torch.arange(keys.shape[1], dtype=torch.float64)
    distance = positions[None, :] - positions[:, None]  # s - t of query t and key s
    turns = torch.polar(torch.ones(1, 1, 1, dtype=torch.float64), distance[..., None] * frequencies)
    return torch.einsum("htl,tsl,hsl->hts", queries.conj(), turns, keys).real


@pytest.mark.parametrize(("groups", "kind"), [(1, "complex"), (3, "complex"), (3, "real"), (4, "complex")])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_with_all_slots_every_score_at_every_distance_is_kept(groups, kind, damping):
    pairs, group, length = 3, 2, 11
    slots = choose_slots(
        positive(pairs, groups, kind), positive(pairs, groups, kind, seed=1), pairs * groups, damping=damping
    )
    frequencies = torch.tensor([1.0, 0.2, 0.01], dtype=torch.float64)
    keys = complex_normal(groups, length, pairs, seed=2)
    queries = complex_normal(groups * group, length, pairs, seed=3)
    expected = scores(queries, keys.repeat_interleave(group, 0), frequencies)

    at = list(slots.pairs)
    shared = torch.einsum("ng,gsn->sn", slots.mix, keys[..., at])  # the one RoPE key of all heads
    asked = slots.unmix.conj().mT.repeat_interleave(group, 0)[:, None] * queries[..., at]
    found = scores(asked, shared.expand(groups * group, -1, -1), frequencies[at])
    assert (found - expected).abs().max() <= TOLERANCE
    assert slots.residual.abs().max() <= TOLERANCE
    assert slots.moved_cost == pytest.approx(0.0, abs=TOLERANCE)


@pytest.mark.parametrize("num_slots", range(7))
def test_slots_and_residual_add_up_to_the_key(num_slots):
    slots = choose_slots(positive(2, 3), positive(2, 3, seed=1), num_slots, damping=0.1)
    keys = complex_normal(2, 3, seed=2)
    back = torch.einsum("lgh,lh->lg", slots.residual, keys)
    for n, pair in enumerate(slots.pairs):
        back[pair] += slots.unmix[n] * (slots.mix[n] @ keys[pair])
    assert len(slots.pairs) == num_slots
    assert max_difference(back, keys) <= TOLERANCE


@pytest.mark.parametrize("num_slots", range(7))
@pytest.mark.parametrize("damping", [0.0, 0.2])
def test_no_other_choice_of_slots_is_cheaper(num_slots, damping):
    key_moment, metric = positive(3, 2), positive(3, 2, seed=7)
    slots = choose_slots(key_moment, metric, num_slots, damping=damping)
    weight = damped(metric, damping)
    counts = [c for c in itertools.product(range(3), repeat=3) if sum(c) == num_slots]
    best = min(best_cost(c, key_moment, weight) for c in counts)
    assert cost_of_moving(slots, key_moment, weight) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert slots.moved_cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert slots.kept_cost + slots.moved_cost == pytest.approx(best_cost((0, 0, 0), key_moment, weight), rel=1e-12)


def test_one_slot_a_pair_takes_the_costliest_pairs():
    # Without the restriction, the second pair takes two of the three slots.
    key_moment, metric = positive(4, 3), positive(4, 3, seed=19)
    free = choose_slots(key_moment, metric, 3, damping=0.0)
    assert len(set(free.pairs)) == 2
    slots = choose_slots(key_moment, metric, 3, damping=0.0, one_per_pair=True)
    assert len(set(slots.pairs)) == 3
    counts = [c for c in itertools.product(range(2), repeat=4) if sum(c) == 3]
    best = min(best_cost(c, key_moment, metric) for c in counts)
    assert cost_of_moving(slots, key_moment, metric) == pytest.approx(best, rel=1e-9)
    assert best > 1.1 * cost_of_moving(free, key_moment, metric)


def test_slots_come_costliest_first():
    key_moment, metric = positive(3, 3), positive(3, 3, seed=2)
    kept = [choose_slots(key_moment, metric, n, damping=0.0) for n in range(10)]
    gains = [b.kept_cost - a.kept_cost for a, b in itertools.pairwise(kept)]
    assert gains == sorted(gains, reverse=True)
    for fewer, more in itertools.pairwise(kept):
        assert more.pairs[: len(fewer.pairs)] == fewer.pairs


def test_prescribed_numbers_of_slots_are_met_in_the_pairs_order():
    key_moment, metric = positive(4, 3), positive(4, 3, seed=2)
    counts = (0, 2, 1, 3)
    slots = choose_slots(key_moment, metric, 6, damping=0.0, counts=counts)
    assert slots.pairs == (1, 1, 2, 3, 3, 3)
    assert cost_of_moving(slots, key_moment, metric) == pytest.approx(best_cost(counts, key_moment, metric), rel=1e-9)


def test_prescribed_numbers_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="3 slots prescribed, 4 wanted"):
        choose_slots(positive(2, 2), positive(2, 2), 4, damping=0.0, counts=(1, 2))


def test_real_moments_mix_heads_by_real_numbers():
    slots = choose_slots(positive(3, 3, "real"), positive(3, 3, "real", seed=1), 4, damping=0.1)
    assert not any(part.imag.any() for part in (slots.mix, slots.unmix, slots.residual))
    assert slots.mix.dtype == torch.complex128


def test_a_metric_that_saw_nothing_ranks_by_energy():
    key_moment = positive(2, 2)
    slots = choose_slots(key_moment, torch.zeros_like(key_moment), 1, damping=0.01)
    assert slots.kept_cost == pytest.approx(max(torch.linalg.matrix_norm(m, 2).item() for m in key_moment), rel=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(pairs=st.integers(1, 4), groups=st.integers(1, 4), damping=st.sampled_from([0.0, 0.01, 1.0]), data=st.data())
def test_for_any_sizes_slots_reproduce_what_the_residual_leaves(pairs, groups, damping, data):
    num_slots = data.draw(st.integers(0, pairs * groups))
    seed = data.draw(st.integers(0, 1000))
    key_moment, metric = positive(pairs, groups, seed=seed), positive(pairs, groups, seed=seed + 1)
    slots = choose_slots(key_moment, metric, num_slots, damping=damping)
    whole = slots.residual.clone()
    for n, pair in enumerate(slots.pairs):
        whole[pair] += torch.outer(slots.unmix[n], slots.mix[n])
        # each mixture is the left inverse of its own way back, and the residual holds nothing of it
        assert abs((slots.mix[n] @ slots.unmix[n]).item() - 1) <= 1e-9
        assert (slots.residual[pair] @ slots.unmix[n]).abs().max() <= 1e-9 * slots.unmix[n].abs().max()
    assert (whole - torch.eye(groups)).abs().max() <= 1e-9
    weight = damped(metric, damping)
    none = tuple(0 for _ in range(pairs))
    assert slots.moved_cost == pytest.approx(
        cost_of_moving(slots, key_moment, weight), rel=1e-7, abs=1e-12 * best_cost(none, key_moment, weight)
    )


PAIRS, GROUPS, GROUP, SAMPLES = 3, 2, 3, 200


def gradient_samples(noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """γ [n F G], g [n F H] and rho [H F] with γ_g = Σ_{i in g} conj(rho_i) g_i + noise; the g_i are correlated."""
    rho = complex_normal(GROUPS * GROUP, PAIRS, seed=5) / 2
    g = complex_normal(SAMPLES, PAIRS, GROUPS * GROUP, seed=6)
    g = g + 0.8 * g.roll(1, dims=-1)
    gamma = (rho.conj().mT * g).unflatten(-1, (GROUPS, GROUP)).sum(-1)
    return gamma + noise * complex_normal(SAMPLES, PAIRS, GROUPS, seed=8), g, rho


def test_constants_that_made_the_gradients_are_found():
    gamma, g, rho = gradient_samples(noise=0.0)
    found = substitute_rotation(second_moment(torch.cat((gamma, g), dim=-1)), GROUPS, damping=0.0)
    # normal equations square the samples' condition number, here below 1e2
    assert max_difference(found.constants, rho) <= 1e-11
    assert found.metric.abs().max() <= 1e-11


@pytest.mark.parametrize(("damping", "pulled"), [(0.0, False), (0.05, False), (0.4, True)])
def test_constants_are_the_ridge_regression_of_the_samples(damping, pulled):
    gamma, g, _ = gradient_samples(noise=0.7)
    towards = complex_normal(GROUPS * GROUP, PAIRS, seed=17) * float(pulled)
    found = substitute_rotation(
        second_moment(torch.cat((gamma, g), dim=-1)), GROUPS, damping=damping, towards=towards if pulled else None
    )
    left = gamma.clone()
    for pair, group in itertools.product(range(PAIRS), range(GROUPS)):
        heads = slice(group * GROUP, (group + 1) * GROUP)
        inputs, target = g[:, pair, heads], gamma[:, pair, group]
        ridge = (damping * inputs.abs().square().mean() * SAMPLES).sqrt()
        rows = torch.cat((inputs, ridge * torch.eye(GROUP, dtype=torch.complex128)))
        prior = ridge * towards[heads, pair].conj()
        fit = torch.linalg.lstsq(rows, torch.cat((target, prior))[:, None]).solution[:, 0]
        assert max_difference(found.constants[heads, pair], fit.conj()) <= 1e-10
        left[:, pair, group] -= inputs @ fit
    assert max_difference(found.metric, second_moment(left)) <= 1e-10


def test_heads_without_gradients_get_constants_of_zero():
    gamma, g, _ = gradient_samples(noise=0.1)
    moment = second_moment(torch.cat((gamma, torch.zeros_like(g)), dim=-1))
    found = substitute_rotation(moment, GROUPS, damping=1e-3)
    assert not found.constants.any()
    assert max_difference(found.metric, second_moment(gamma)) <= TOLERANCE


def test_one_head_a_group_needs_no_more_than_a_quotient():
    gamma, g, _ = gradient_samples(noise=0.4)
    gamma, g = gamma, g[..., :GROUPS]
    found = substitute_rotation(second_moment(torch.cat((gamma, g), dim=-1)), GROUPS, damping=0.0)
    expected = ((gamma * g.conj()).mean(0) / g.abs().square().mean(0)).conj().mT
    assert max_difference(found.constants, expected) <= 1e-12


def test_more_slots_than_components_are_refused() -> None:
    moment = torch.eye(2, dtype=torch.complex128).repeat(3, 1, 1)
    with pytest.raises(ValueError, match="4 slots wanted of 3"):
        choose_slots(moment, moment, 4, damping=0.0, one_per_pair=True)
