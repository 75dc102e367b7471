"""Tests of statements of the papers that do not hold as printed, and of corrected ones (docs/guide/deviations.md)."""

import pytest
import sympy
import torch


def nonnegative(names):
    return sympy.symbols(names, nonnegative=True)


def test_condition_19_of_orthofl_holds_only_if_both_sides_vanish():
    """With a = max(0, G - L|delta|) <= G + L|s| = a + c, the right side has only negative coefficients."""
    a, c, eta, lipschitz = nonnegative("a c eta L")
    half = lipschitz * eta / 2
    right = eta * (1 - half) * a**2 - eta * (1 + half) * (a + c) ** 2
    assert all(coefficient < 0 for coefficient in sympy.Poly(right, a, c, eta, lipschitz).coeffs())
    # |rho + alpha - alpha'|, |<g, u>|, |d|, |delta|, |d + delta|, G, beta and 1 - beta are nonnegative.
    r, inner, d, delta, both, g, beta, rest = terms = nonnegative("r inner d delta both G beta rest")
    left = rest * r * inner + rest * g * d + beta * g * delta
    left += lipschitz / 2 * (rest**2 * (r**2 + both**2) + delta**2)
    assert all(coefficient > 0 for coefficient in sympy.Poly(left, *terms, lipschitz).coeffs())


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_equation_52_of_the_report_contracts_by_rate_times_proximal_weight(steps):
    eta, mu = sympy.symbols("eta mu", positive=True)
    gradients = sympy.symbols(f"g:{steps}")
    displacement = sympy.Integer(0)
    for gradient in gradients:
        displacement -= eta * (gradient + mu * displacement)

    def unrolled(factor):
        return -eta * sum(g * factor ** (steps - 1 - k) for k, g in enumerate(gradients))

    assert sympy.expand(displacement - unrolled(1 - eta * mu)) == 0
    printed = sympy.expand(displacement - unrolled(1 - mu))
    assert (printed == 0) == (steps == 1)


def test_attention_of_width_128_rejects_6_heads():
    with pytest.raises(AssertionError, match="divisible by num_heads"):
        torch.nn.MultiheadAttention(128, 6)
