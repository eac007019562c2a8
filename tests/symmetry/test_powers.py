"""Units that scale by another power than one: squares and roots of what is hidden."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor, nn

import flatgauge as fg


class Powers(nn.Module):
    """A power between two layers, and hidden units without a way out."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.first, self.last, self._power = nn.Linear(6, 5), nn.Linear(5, 3), power
        with torch.no_grad():
            self.last.weight[:, :2] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) ** self._power)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_one_sided_units_get_norm_one_whatever_their_power(power):
    torch.manual_seed(0)
    model, x = Powers(power).double(), torch.randn(4, 6).double()
    gauge = fg.find_gauge(model, x)
    move = gauge.sample(generator=Generator().manual_seed(0), powers_of_two=False)
    with pytest.warns(UserWarning, match="2 units have weights on one side only"):
        even, again = (fg.balance(m, x) for m in (model, gauge.rescale(model, move)))
    entering = torch.cat([even.first.weight, even.first.bias[:, None]], 1).norm(dim=1)
    torch.testing.assert_close(entering[:2], torch.ones(2).double())
    for one, other in zip(even.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
    torch.testing.assert_close(even(x), model(x))


def test_weights_that_are_not_finite_have_no_balance():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"`2.weight` of the model holds values that are nan"):
        fg.balance(model, torch.randn(2, 3))
