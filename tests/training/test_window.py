import math

import pytest
import torch

from loka.training.window import Window


def test_mean_loss_and_ne_of_the_window():
    window = Window()
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    window.add(0, 0, torch.tensor(0.5), 4, labels)
    window.add(1, 1, torch.tensor(0.7), 4, labels)
    assert window.find_bad() is None
    assert window.loss() == pytest.approx(0.6)
    entropies = [-(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (0.5, 0.25)]
    assert window.ne() == pytest.approx(0.6 / (sum(entropies) / 2))
    assert window.examples == 8


def test_the_first_bad_loss_is_named():
    window = Window()
    for step, value in enumerate([0.1, math.nan, math.inf]):
        window.add(step, 10 + step, torch.tensor(value), 1, None)
    assert window.find_bad() == (1, 11)
    assert window.find_bad() is None  # reported once


def test_ne_is_unknown_without_labels_or_with_one_class():
    window = Window()
    window.add(0, 0, torch.tensor(0.5), 4, None)
    assert window.ne() is None
    window.add(0, 0, torch.tensor(0.5), 4, torch.ones(4, 1))
    window.find_bad()
    assert window.ne() is None
