"""The networks in `zoo` are the ones that were trained: they score what their table says."""

import pytest
import zoo

LARGE = {
    "lenet": 1000,
    "lenet_adv": 1000,
    "resnet20": 1000,
    "resnet32": 250,
    "resnet44": 250,
    "resnet56": 250,
}


@pytest.mark.parametrize("name", sorted(set(zoo.ZOO) - set(LARGE)))
def test_other_peoples_networks_do_what_their_table_says(name):
    accuracy = zoo.accuracy(zoo.trained(name), zoo.images(name))
    assert accuracy == pytest.approx(zoo.ZOO[name].accuracy, abs=0.021)  # two images of 10,000


@pytest.mark.parametrize(("name", "count"), LARGE.items())
def test_large_networks_of_other_people_on_the_first_images(name, count):
    expected = zoo.ZOO[name].accuracy / 100
    accuracy = zoo.accuracy(zoo.trained(name), zoo.images(name, count)) / 100
    assert abs(accuracy - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
