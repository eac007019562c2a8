"""Losses by name, by module and by callable, each divided by its own denominator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge import LossSurface

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(14, 4, generator=GENERATOR).double()
LABELS = torch.randint(0, 3, (14,), generator=GENERATOR)
SOFT = torch.randn(14, 3, generator=GENERATOR).double().softmax(1)
NUMBERS = torch.randn(14, 3, generator=GENERATOR).double()
WEIGHT = torch.tensor([0.2, 1.0, 5.0]).double()
IGNORING = LABELS.clone()
IGNORING[[1, 5, 6, 7]] = -100


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


LOSSES = {
    "cross_entropy": ("cross_entropy", F.cross_entropy, LABELS),
    "function": (F.cross_entropy, F.cross_entropy, LABELS),
    "int32 labels": ("cross_entropy", lambda o, t: F.cross_entropy(o, t.long()), LABELS.int()),
    "class weights": (nn.CrossEntropyLoss(WEIGHT), None, LABELS),
    "ignored labels": ("cross_entropy", F.cross_entropy, IGNORING),
    "other ignored label": (nn.CrossEntropyLoss(ignore_index=2), None, LABELS),
    "weights and ignored": (nn.CrossEntropyLoss(WEIGHT, ignore_index=-100), None, IGNORING),
    "label smoothing": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), None, IGNORING),
    "soft labels": ("cross_entropy", F.cross_entropy, SOFT),
    "soft labels, weights": (nn.CrossEntropyLoss(WEIGHT), None, SOFT),
    "mse": ("mse", F.mse_loss, NUMBERS),
    "mse module": (nn.MSELoss(), None, NUMBERS),
    "l1": (nn.L1Loss(), None, NUMBERS),
    "bce": ("binary_cross_entropy", F.binary_cross_entropy_with_logits, SOFT),
    "bce module": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), None, SOFT),
    "huber, by watching": (nn.HuberLoss(), None, NUMBERS),
    "callable": (lambda o, t: F.cross_entropy(o, t), None, LABELS),
    "callable, ignored labels": (lambda o, t: F.cross_entropy(o, t), None, IGNORING),
}


@pytest.mark.parametrize("chunk", [1, 5, 14])
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_add_up_to_the_loss_of_the_whole(name, chunk):
    loss, literal, target = LOSSES[name]
    model, literal = net(), literal or loss
    expected = literal(model(X), target)
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    surface = LossSurface(model, loss, (X, target), chunk=chunk)
    assert surface.value() == pytest.approx(expected.item(), rel=1e-12)
    flat = torch.cat([part.reshape(-1) for part in gradient])
    torch.testing.assert_close(surface.gradient(), flat, rtol=1e-10, atol=1e-14)


def test_nll_of_log_probabilities_is_cross_entropy():
    model = nn.Sequential(*net(), nn.LogSoftmax(1))
    for loss in ("nll", nn.NLLLoss(WEIGHT)):
        surface = LossSurface(model, loss, (X, IGNORING), chunk=4)
        weight = None if loss == "nll" else WEIGHT
        expected = F.cross_entropy(net()(X), IGNORING, weight=weight).item()
        assert surface.value() == pytest.approx(expected, rel=1e-12)


class PerToken(nn.Module):
    """Outputs of shape (N, T, C), or (N, C, T) as torch likes it."""

    def __init__(self, *, classes_first: bool) -> None:
        super().__init__()
        self.net, self.classes_first = net(), classes_first

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x.reshape(-1, 7, 4))
        return out.transpose(1, 2) if self.classes_first else out


@pytest.mark.parametrize("classes_first", [False, True])
def test_positions_count_as_samples_where_the_loss_counts_them(classes_first):
    inputs, target = X.repeat(3, 1).reshape(6, 7, 4), IGNORING.repeat(3).reshape(6, 7)
    model = PerToken(classes_first=classes_first)
    expected = F.cross_entropy(net()(inputs).reshape(-1, 3), target.reshape(-1)).item()
    for chunk in (1, 4, 6):
        surface = LossSurface(model, "cross_entropy", (inputs, target), chunk=chunk)
        assert surface.value() == pytest.approx(expected, rel=1e-12)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=WEIGHT)


def test_a_hidden_denominator_is_refused_until_it_is_told():
    with pytest.raises(ValueError, match=r"no mean over its samples.*pass `denominator=`"):
        LossSurface(net(), weighted, (X, LABELS))
    surface = LossSurface(
        net(), weighted, (X, LABELS), denominator=lambda t: WEIGHT[t].sum(), chunk=3
    )
    assert surface.value() == pytest.approx(weighted(net()(X), LABELS).item(), rel=1e-12)
    with pytest.raises(ValueError, match="no mean over its samples"):
        LossSurface(net(), weighted, (X, LABELS), denominator=len)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: F.cross_entropy(o, t, reduction="sum"),
        lambda o, t: o.square().sum(),
    ],
)
def test_a_sum_is_recognised(loss):
    with pytest.raises(ValueError, match="is a sum over the batch"):
        LossSurface(net(), loss, (X, LABELS))


@pytest.mark.parametrize(
    ("given", "mean", "target"),
    [
        (nn.CrossEntropyLoss(WEIGHT, reduction="sum"), nn.CrossEntropyLoss(WEIGHT), IGNORING),
        (nn.MSELoss(reduction="sum"), nn.MSELoss(), NUMBERS),
        (nn.HuberLoss(reduction="sum"), nn.HuberLoss(), NUMBERS),
    ],
)
def test_a_module_that_sums_is_taken_as_its_mean_with_a_note(given, mean, target):
    surface = LossSurface(net(), given, (X, target), chunk=5)
    assert surface.value() == pytest.approx(mean(net()(X), target).item(), rel=1e-12)
    assert any("(reduction='sum') is taken as its mean" in note for note in surface.notes)
    assert given.reduction == "sum"


def test_a_sum_over_the_batch_size_is_a_mean_over_samples():
    model, loss = nn.Sequential(net(), nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean")
    surface = LossSurface(model, loss, (X, SOFT), chunk=5)
    assert surface.value() == pytest.approx(loss(model(X), SOFT).item(), rel=1e-12)


def test_a_module_that_does_not_reduce_is_refused_by_name():
    with pytest.raises(ValueError, match=r"reduction='none'.*CrossEntropyLoss\(reduction='mean'"):
        LossSurface(net(), nn.CrossEntropyLoss(reduction="none"), (X, LABELS))


def test_a_contrastive_loss_is_refused():
    with pytest.raises(ValueError, match="samples influence each other"):
        LossSurface(net(), lambda o, t: F.cross_entropy(o @ o.T, t), (X, torch.arange(14) % 2))


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        ("cross-entropy", LABELS, "`loss='cross-entropy'` is not a name flatgauge knows"),
        ("cross_entropy", NUMBERS[:, 0], r"got torch.float64 targets of shape \(4,\)"),
        ("cross_entropy", LABELS.reshape(7, 2).repeat(2, 1), r"labels of shape \(4, 2\)"),
        ("cross_entropy", None, "a NoneType as targets"),
        ("mse", NUMBERS[:, :1], r"\(4, 3\) with targets of shape \(4, 1\), which would be broad"),
        ("mse", None, "with targets of shape NoneType"),
        (lambda o, t: o, LABELS, r"returned shape \(\d+, 3\); it must return the mean"),
        (lambda o, t: 3.0, LABELS, "returned float; it must return the mean"),
        (None, LABELS, "the Tensor it returned has no `loss`"),
    ],
)
def test_losses_that_do_not_fit(loss, target, message):
    data = [(X,)] if target is None else (X, target)
    with pytest.raises(ValueError, match=message):
        LossSurface(net(), loss, data)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, "`loss` is a int"),
        (nn.CrossEntropyLoss, r"`loss` is the class CrossEntropyLoss; .* `CrossEntropyLoss\(\)`"),
        (lambda output: output.mean(), r"takes the arguments \(output\), but .* with two"),
        (nn.TripletMarginLoss(), r"\(anchor.*, positive.*, negative.*\).*, but .* with two"),
    ],
)
def test_a_loss_of_the_wrong_kind(loss, message):
    with pytest.raises(TypeError, match=message):
        LossSurface(net(), loss, (X, LABELS))


def test_a_loss_that_fails_is_named_with_the_shapes():
    message = r"the loss 'broken' fails on outputs of shape \(4, 3\) and targets of shape \(4,\)"

    def broken(output: Tensor, target: Tensor) -> Tensor:
        return output @ target.double()

    with pytest.raises(ValueError, match=message + ".*RuntimeError"):
        LossSurface(net(), broken, (X, LABELS))


SIGNS = NUMBERS.sign()
LOGS = nn.Sequential(net(), nn.LogSoftmax(1))


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        ("binary_cross_entropy", SIGNS, r"targets from -1 to 1, .* from 0 to 1; give `\(y \+ 1\)"),
        (nn.BCEWithLogitsLoss(), 3 * SIGNS.clamp(0), "targets from 0 to 3, .* from 0 to 1"),
        (nn.BCEWithLogitsLoss(WEIGHT), SIGNS, "'BCEWithLogitsLoss' got targets from -1 to 1"),
        (F.binary_cross_entropy_with_logits, SIGNS, "targets from -1 to 1"),
        (nn.MultiLabelSoftMarginLoss(), SIGNS, "targets from -1 to 1"),
        ("cross_entropy", NUMBERS, "class probabilities, but they go down to -"),
        ("cross_entropy", 2 * SOFT, "one sample add up to 2; divide them by their sum"),
        (nn.CrossEntropyLoss(), SOFT.float() + 0.1, "one sample add up to 1.3"),
        (nn.SoftMarginLoss(), SIGNS.clamp(0), "got the target 0, but it needs -1 or 1; give `2 *"),
        (nn.HingeEmbeddingLoss(), SIGNS.clamp(0), "got the target 0, but it needs -1 or 1"),
        (nn.PoissonNLLLoss(), SIGNS, "targets from -1 to 1, but it needs numbers of at least 0"),
        (nn.MultiMarginLoss(), LABELS + 1, "but the model has 3 outputs, so labels must lie in 0"),
        (nn.MultiLabelMarginLoss(), LABELS[:, None].repeat(1, 3) + 1, "class numbers must lie in"),
    ],
)
def test_targets_out_of_range_are_refused_wherever_they_are(loss, target, message):
    allowed = SOFT if target.is_floating_point() else target.clamp(max=2)
    if isinstance(loss, (nn.SoftMarginLoss, nn.HingeEmbeddingLoss)):
        allowed = SIGNS
    LossSurface(net(), loss, (X, allowed))
    late = torch.cat([allowed[:8], target[8:]])
    with pytest.raises(ValueError, match=message):
        LossSurface(net(), loss, (X, late)).value()


def test_log_likelihood_needs_labels():
    with pytest.raises(ValueError, match=r"`loss='nll'` needs integer class labels, but got"):
        LossSurface(LOGS, "nll", (X, SOFT))


def test_probabilities_of_half_precision_are_accepted():
    LossSurface(net(), "cross_entropy", (X, SOFT.half()))


def test_every_label_ignored():
    with pytest.raises(ValueError, match=r"the denominator of the loss over all data is 0"):
        LossSurface(net(), "cross_entropy", (X, torch.full((14,), -100)))


@pytest.mark.parametrize("kind", ["tuple", "dict", "object"])
def test_the_prediction_is_found_in_what_the_model_returns(kind):
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor):
            logits = self.net(x)
            if kind == "object":
                return type("Output", (), {"logits": logits})()
            return (logits, None) if kind == "tuple" else {"logits": logits}

    surface = LossSurface(Returning(), "cross_entropy", (X, LABELS))
    assert surface.value() == pytest.approx(F.cross_entropy(net()(X), LABELS).item(), rel=1e-12)


class Several(nn.Module):
    """Returns hidden units and logits, in one order or the other, behind what is no tensor."""

    def __init__(self, *, hidden_first: bool) -> None:
        super().__init__()
        self.net, self.hidden_first = net(), hidden_first

    def forward(self, x: Tensor):
        hidden = self.net[:2](x)
        pair = hidden, self.net[2](hidden)
        return (None, *(pair if self.hidden_first else pair[::-1]), (hidden, hidden))


def test_the_first_of_several_tensors_is_taken_only_if_no_other_fits():
    surface = LossSurface(Several(hidden_first=False), "mse", (X, NUMBERS))
    assert surface.value() == pytest.approx(F.mse_loss(net()(X), NUMBERS).item(), rel=1e-12)
    assert any("(4, 3), (4, 5); the loss is taken of the first" in n for n in surface.notes)
    message = r"returns 2 tensors, of shapes \(4, 5\), \(4, 3\); {} of them fit .* function that"
    with pytest.raises(ValueError, match=message.format(1)):
        LossSurface(Several(hidden_first=True), "mse", (X, NUMBERS))
    with pytest.raises(ValueError, match=message.format(2)):
        LossSurface(Several(hidden_first=True), "cross_entropy", (X, LABELS))
    picked = LossSurface(
        Several(hidden_first=True), lambda o, t: F.cross_entropy(o[2], t), (X, LABELS)
    )
    assert picked.value() == pytest.approx(F.cross_entropy(net()(X), LABELS).item(), rel=1e-12)


def test_an_output_without_a_prediction():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor):
            return {"scores": self.net(x)}

    with pytest.raises(TypeError, match="returns a dict with no `logits`"):
        LossSurface(Odd(), "cross_entropy", (X, LABELS))
